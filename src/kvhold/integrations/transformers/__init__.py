"""kvhold with Hugging Face transformers.

    with kvhold.open_cache(ram_bytes="2GiB") as cache:  # or kvhold.connect()
        reuse = Reuse(model, cache)
        output = reuse.generate(input_ids, max_new_tokens=32)   # as model.generate
        reuse.last.num_loaded                                   # tokens that were not computed

Supported: transformers 5, decoder-only models with full attention, on one device.
"""

from kvhold.integrations.transformers.reuse import Reuse, ReuseResult

__all__ = ["Reuse", "ReuseResult"]
