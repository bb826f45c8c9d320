#!/usr/bin/python3
"""Writes golden/: cases of `fixed`, from the description of its payload in fixed.c, not from its code.

Usage: golden.py [FOLDER]
"""

import pathlib
import struct
import sys
from fractions import Fraction


def payload(values, bits):
    """(payload, what it decodes to)."""
    most = 2 ** (bits - 1) - 1
    largest = max(abs(Fraction(v)) for v in values)
    e = 0
    if largest:
        e = -149
        while largest > most * Fraction(2) ** e and e < (121 if bits == 8 else 125):
            e += 1
    codes = [round(Fraction(v) / Fraction(2) ** e) for v in values]  # ties to even
    codes = [max(-most, min(most, q)) for q in codes]
    if bits == 8:
        data = struct.pack(f"<{len(codes)}b", *codes)
    else:
        halves = [q & 15 for q in codes] + [0] * (len(codes) % 2)
        data = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2]))
    return struct.pack("<h", e) + data, [float(q * Fraction(2) ** e) for q in codes]


def as_floats(values):
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))


def main(folder):
    folder.mkdir(exist_ok=True)
    ramp = as_floats([((i * 37) % 101 - 50) * 0.173 for i in range(129)])
    inputs = {
        "one": (3.7,), "ramp": ramp, "zeros": (0.0, -0.0, 0.0),
        "ties": (127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 7.0),
        "limit": (127.0, -127.0), "above_limit": (127.5, 1.0), "limit4": (7.0, -7.0, 1.0),
        "denormals": (2.0**-149, -(2.0**-140), 0.0), "largest": (3.4028234663852886e38, -1e38, 1.0),
    }
    for name, values in inputs.items():
        values = as_floats(values)
        for bits in (8, 4):
            base = folder / f"{name}_{bits}"
            data, decoded = payload(values, bits)
            base.with_suffix(".spec").write_text(f"fixed(bits={bits})\n{len(values)}\nencode\n")
            base.with_suffix(".in").write_bytes(struct.pack(f"<{len(values)}f", *values))
            base.with_suffix(".bin").write_bytes(data)
            base.with_suffix(".out").write_bytes(struct.pack(f"<{len(values)}f", *decoded))
    refused = {
        "short_8": (8, 3, b"\0\0\1\2"), "long_8": (8, 3, b"\0\0\1\2\3\4"), "empty_8": (8, 3, b""),
        "code_8": (8, 2, b"\0\0\x80\1"), "code_4": (4, 2, b"\0\0\x18"), "half_4": (4, 1, b"\0\0\x11"),
        "exponent_high_8": (8, 1, struct.pack("<hb", 122, 1)), "exponent_low_8": (8, 1, struct.pack("<hb", -150, 1)),
        "exponent_high_4": (4, 1, struct.pack("<hb", 126, 1)),
    }
    for name, (bits, n, data) in refused.items():
        base = folder / f"refuse_{name}"
        base.with_suffix(".spec").write_text(f"fixed(bits={bits})\n{n}\nrefuse\n")
        base.with_suffix(".bin").write_bytes(data)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "golden")
