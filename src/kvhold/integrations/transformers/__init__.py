"""kvhold with Hugging Face transformers: KV computed once is loaded instead of computed again.

    with kvhold.open_cache(ram_bytes="2GiB") as cache:  # or kvhold.connect(), for this host's node
        reuse = Reuse(model, cache)
        output = reuse.generate(input_ids, max_new_tokens=32)   # as model.generate
        reuse.last.num_loaded                                   # tokens that were not computed

`reuse.py` is all a user sees. `calls.py` says which calls can be served and which go to the model
as they are, `geometry.py` what shape a model's KV has, or refuses it, `identity.py` what the KV
depends on, `weights.py` tells weights by their content.
Supported: transformers 5, decoder-only models whose layers all have full attention, on one device.
"""

from kvhold.integrations.transformers.reuse import Outcome, Reuse

__all__ = ["Outcome", "Reuse"]
