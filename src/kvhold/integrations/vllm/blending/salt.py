"""A private salt, so that vLLM's prefix cache never takes a blended block for an exact one."""

from secrets import token_hex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def make_private(request: "Request") -> str:
    """Rename all blocks of the request, also those to come.

    Call it while the request has no blocks. Returns why it cannot be done; then nothing changes.
    """
    hashes, salt = list(request.block_hashes), request.cache_salt
    if not hashes:
        return "its prompt is shorter than a block"
    request.cache_salt = f"{salt or ''} kvhold-blend {token_hex(16)}"
    request.block_hashes.clear()
    request.update_block_hashes()
    if len(request.block_hashes) == len(hashes) and not set(hashes) & set(request.block_hashes):
        return ""
    request.cache_salt = salt
    request.block_hashes[:] = hashes
    return "this vLLM does not name blocks by cache_salt"
