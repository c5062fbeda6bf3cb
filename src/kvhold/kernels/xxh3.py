"""The constants of XXH3-64, with the default secret and no seed.

Algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
"""

from struct import unpack

SHORT_BYTES = 240
STRIPE_BYTES = 64
STRIPES_PER_BLOCK = 16
SCRAMBLE_AT, LAST_AT, MERGE_AT = 128, 121, 11  # offsets in the secret

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9
START = (
    PRIME32_3,
    PRIME64_1,
    PRIME64_2,
    PRIME64_3,
    PRIME64_4,
    PRIME32_2,
    PRIME64_5,
    PRIME32_1,
)


def words_of_secret(at: int, count: int = 8) -> tuple[int, ...]:
    """64-bit, from byte `at` on."""
    return unpack(f"<{count}Q", SECRET[at : at + 8 * count])
