#!/usr/bin/python3
"""An independent second implementation of the codecs, in NumPy, for golden files.

Written from the description of the formats alone, so that a misreading in the C++ codecs cannot
hide in the files they are tested against.

  reference_codecs.py --write [DIR]   writes the golden files
  reference_codecs.py --check [DIR]   regenerates them in memory and compares; exit code 1 names
                                      what differs, is missing or is not ours

DIR defaults to tests/golden/compressors. A case is a few files in DIR/<codec>/:
  <case>.spec      line 1: the compressor, "topk(ratio=0.01)"; line 2: n;
                   line 3: "encode", "refuse" or "feedback rounds=R"
  <case>.in        f32[n]; feedback: f32[R * n]                   (not for refuse)
  <case>.bin       the payload; feedback: R times u32 length, payload
  <case>.out       what it decodes to, f32[n]; feedback: f32[R * n]   (not for refuse)
  <case>.residual  f32[n], the explicit residual after the last round   (feedback only)
All numbers are little-endian. Feedback: q = g + e, payload of q, e = q - C(q), all in float32.
"""

import argparse
import pathlib
import struct
import sys

import numpy as np

F32 = np.float32
BLOCK = 4096
LANES = 16
GAP_BLOCK = 128


# ---------------------------------------------------------------------------------------- codecs


def lane_sum(values):
    """Sum of float32 values in the stated order: 16 float32 lanes inside a block of 4096, lanes
    and then blocks in float64."""
    total = 0.0
    for start in range(0, len(values), BLOCK):
        block = values[start:start + BLOCK]
        lanes = np.zeros(LANES, F32)
        for row in range(0, len(block), LANES):
            part = block[row:row + LANES]
            lanes[:len(part)] = lanes[:len(part)] + part
        block_sum = 0.0
        for lane in lanes:
            block_sum += float(lane)
        total += block_sum
    return total


def to_half_bits(x):
    """Float32 to float16 bits: nearest even, finite overflow saturates."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    overflow = np.isinf(half) & np.isfinite(x)
    bits = half.view(np.uint16).copy()
    bits[overflow] = np.where(np.signbit(x[overflow]), 0xFBFF, 0x7BFF)
    return bits.astype("<u2")


def from_half_bits(bits):
    return bits.astype(np.uint16).view(np.float16).astype(F32)


class NoneCodec:
    def encode(self, x):
        return x.astype("<f4").tobytes()

    def decode(self, payload, n):
        assert len(payload) == 4 * n
        return np.frombuffer(payload, "<f4").astype(F32)


class Fp16Codec:
    def encode(self, x):
        return to_half_bits(x).tobytes()

    def decode(self, payload, n):
        assert len(payload) == 2 * n
        return from_half_bits(np.frombuffer(payload, "<u2"))


class Bf16Codec:
    def encode(self, x):
        bits = x.view(np.uint32).astype(np.uint64)
        low = bits & 0xFFFF
        high = bits >> 16
        up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
        high = high + up
        infinite = (high & 0x7FFF) == 0x7F80
        return np.where(infinite, high - 1, high).astype("<u2").tobytes()

    def decode(self, payload, n):
        assert len(payload) == 2 * n
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(F32)


class OnebitCodec:
    def __init__(self, scaling="l1", block="0"):
        self.scaling = scaling
        self.block = int(block)
        assert self.block % BLOCK == 0

    def spans(self, n):
        size = self.block or n
        return [(start, min(start + size, n)) for start in range(0, n, size)]

    def scales(self, x):
        n = len(x)
        magnitude = np.abs(x)
        if self.scaling == "two_means":
            negative = np.signbit(x)
            result = []
            for chosen in (negative, ~negative):
                count = int(chosen.sum())
                part = lane_sum(np.where(chosen, magnitude, F32(0)))
                result.append(F32(part / count) if count else F32(0))
            return result
        if not magnitude.any():
            return [F32(0)]
        if self.scaling == "l1":
            return [F32(lane_sum(magnitude) / n)]
        if self.scaling == "l2":
            return [F32(np.sqrt(np.float64(lane_sum(x * x) / n)))]
        assert self.scaling == "none"
        return [F32(1)]

    def encode(self, x):
        scales = []
        for begin, end in self.spans(len(x)):
            scales += self.scales(x[begin:end])
        bits = np.packbits(np.signbit(x), bitorder="little")
        return np.array(scales, "<f4").tobytes() + bits.tobytes()

    def decode(self, payload, n):
        spans = self.spans(n)
        a_span = 2 if self.scaling == "two_means" else 1
        head = 4 * a_span * len(spans)
        assert len(payload) == head + (n + 7) // 8
        scales = np.frombuffer(payload[:head], "<f4").astype(F32).reshape(len(spans), a_span)
        bits = np.unpackbits(np.frombuffer(payload[head:], np.uint8), bitorder="little")
        negative = bits[:n].astype(bool)
        out = np.empty(n, F32)
        for (begin, end), pair in zip(spans, scales):
            out[begin:end] = np.where(negative[begin:end], -pair[0], pair[-1])
        return out


class TopkCodec:
    def __init__(self, ratio="0.001", k=None, value="fp16", index="packed"):
        self.ratio = float(ratio)
        self.k = None if k is None else int(k)
        self.value = value
        self.index = index

    def kept(self, n):
        k = self.k if self.k is not None else int(np.floor(n * self.ratio + 0.5))
        return min(max(k, 1), n)

    def encode(self, x):
        n = len(x)
        k = self.kept(n)
        # A stable sort on descending magnitude keeps the lower index first among equals.
        order = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")
        indices = np.sort(order[:k]).astype(np.int64)
        kept = x[indices]
        values = kept.astype("<f4") if self.value == "fp32" else to_half_bits(kept)
        if self.index == "u32":
            return values.tobytes() + indices.astype("<u4").tobytes()
        gaps = np.diff(indices, prepend=-1) - 1
        return values.tobytes() + pack_gaps(gaps)

    def decode(self, payload, n):
        k = self.kept(n)
        size = 4 if self.value == "fp32" else 2
        head = payload[:size * k]
        rest = payload[size * k:]
        values = (np.frombuffer(head, "<f4").astype(F32) if size == 4
                  else from_half_bits(np.frombuffer(head, "<u2")))
        if self.index == "u32":
            assert len(rest) == 4 * k
            indices = np.frombuffer(rest, "<u4").astype(np.int64)
        else:
            indices = np.cumsum(np.array(unpack_gaps(rest, k), np.int64) + 1) - 1
        assert (indices < n).all()
        out = np.zeros(n, F32)
        out[indices] = values
        return out


def pack_gaps(gaps):
    result = bytearray()
    for start in range(0, len(gaps), GAP_BLOCK):
        block = [int(gap) for gap in gaps[start:start + GAP_BLOCK]]
        width = max(block).bit_length()
        bits = 0
        for position, gap in enumerate(block):
            bits |= gap << (position * width)
        result.append(width)
        result += bits.to_bytes((len(block) * width + 7) // 8, "little")
    return bytes(result)


def unpack_gaps(data, k):
    gaps = []
    at = 0
    while len(gaps) < k:
        count = min(GAP_BLOCK, k - len(gaps))
        width = data[at]
        assert width <= 32
        size = (count * width + 7) // 8
        assert at + 1 + size <= len(data)
        bits = int.from_bytes(data[at + 1:at + 1 + size], "little")
        gaps += [(bits >> (i * width)) & ((1 << width) - 1) for i in range(count)]
        at += 1 + size
    assert at == len(data)
    return gaps


CODECS = {"none": NoneCodec, "fp16": Fp16Codec, "bf16": Bf16Codec, "onebit": OnebitCodec,
          "topk": TopkCodec}


def make_codec(spec):
    name, _, rest = spec.partition("(")
    parameters = {}
    if rest:
        assert rest.endswith(")")
        parameters = dict(item.split("=") for item in rest[:-1].split(","))
    return CODECS[name](**parameters)


# ------------------------------------------------------------------------------------------ data


def mix64(x):
    """SplitMix64's finalizer: the same numbers with every NumPy."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def gradient(n, seed):
    """Values like a gradient's: signs even, magnitudes spread over about 10 binary orders. Only
    exact operations, so that every machine makes the same bits."""
    values = np.empty(n, np.float64)
    for i in range(n):
        word = mix64(seed * 1000003 + i)
        mantissa = 1.0 + (word & 0xFFFFFF) / 2.0**24
        exponent = -6 - bin((word >> 24) & 0x3FF).count("1")
        sign = -1.0 if word >> 63 else 1.0
        values[i] = sign * mantissa * 2.0**exponent
    return values.astype(F32)


def special(n, seed):
    """A gradient with ties, zeros of both signs and denormals in it."""
    values = gradient(n, seed)
    pattern = np.array([0.0, -0.0, 1e-40, -1e-40, 1.4e-45, -1.4e-45, 0.25, -0.25, 0.25, 0.25,
                        1e-30, -1e-30], F32)
    at = np.arange(0, n, 3)
    values[at] = pattern[np.arange(len(at)) % len(pattern)]
    return values


def half_edges():
    """Around the borders of float16: halfway cases, overflow, its denormals, flush to zero."""
    top = [65503.0, 65504.0, 65519.0, 65519.996, 65520.0, 65536.0, 1e6, 3.4e38]
    halfway = [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 1.0 + 2.0**-11 + 2.0**-20, 2049.0, 2051.0]
    small = [2.0**-14, 2.0**-14 - 2.0**-26, 2.0**-24, 1.5 * 2.0**-24, 2.0**-25,
             2.0**-25 + 2.0**-40, 2.5 * 2.0**-24, 2.0**-26, 1e-40, 0.0]
    positive = np.array(top + halfway + small, F32)
    return np.concatenate([positive, -positive])


def bfloat_edges():
    """Around the borders of bfloat16, given as bits."""
    words = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3F817FFF, 0x3FFF8000,
             0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F7E8000, 0x00000001, 0x00008000,
             0x00018000, 0x007FFFFF, 0x00800000, 0x00000000]
    bits = np.array(words, np.uint32)
    return np.concatenate([bits, bits | np.uint32(0x80000000)]).view(F32)


def sparse(n, positions):
    """Small values everywhere and large ones at the positions."""
    values = np.full(n, F32(1.0 / 1024), F32)
    values[1::2] *= F32(-1)
    for i, position in enumerate(positions):
        values[position] = F32((-1.0)**i * (1.0 + i / 64.0))
    return values


# ----------------------------------------------------------------------------------------- cases


class Files:
    """The golden files in memory: relative path to bytes."""

    def __init__(self):
        self.contents = {}

    def put(self, codec, case, n, spec, kind, **parts):
        base = f"{codec}/{case}"
        assert f"{base}.spec" not in self.contents, base
        self.contents[f"{base}.spec"] = f"{spec}\n{n}\n{kind}\n".encode()
        for suffix, content in parts.items():
            self.contents[f"{base}.{suffix}"] = content

    def encode(self, spec, case, x):
        codec = make_codec(spec)
        payload = codec.encode(x)
        out = codec.decode(payload, len(x))
        self.put(spec.partition("(")[0], case, len(x), spec, "encode", **{
            "in": x.astype("<f4").tobytes(), "bin": payload, "out": out.astype("<f4").tobytes()})
        return payload

    def feedback(self, spec, case, rounds):
        codec = make_codec(spec)
        n = len(rounds[0])
        residual = np.zeros(n, F32)
        payloads = b""
        outs = b""
        for g in rounds:
            q = g + residual
            payload = codec.encode(q)
            out = codec.decode(payload, n)
            residual = q - out
            payloads += struct.pack("<I", len(payload)) + payload
            outs += out.astype("<f4").tobytes()
        self.put(spec.partition("(")[0], case, n, spec, f"feedback rounds={len(rounds)}", **{
            "in": b"".join(g.astype("<f4").tobytes() for g in rounds), "bin": payloads,
            "out": outs, "residual": residual.astype("<f4").tobytes()})

    def refuse(self, spec, case, n, payload):
        self.put(spec.partition("(")[0], case, n, spec, "refuse", bin=payload)

    def refuse_sizes(self, spec, case, n, payload):
        self.refuse(spec, f"{case}_short", n, payload[:-1])
        self.refuse(spec, f"{case}_long", n, payload + b"\0")
        self.refuse(spec, f"{case}_empty", n, b"")


def casts(files):
    for spec in ("none", "fp16", "bf16"):
        for n in (1, 7, 8, 9, 64, 129) + ((1000,) if spec == "fp16" else ()):
            payload = files.encode(spec, f"n{n}", gradient(n, 10 + n))
            if n == 9:
                files.refuse_sizes(spec, "size", n, payload)
        files.encode(spec, "special", special(129, 1))
        files.feedback(spec, "feedback", [gradient(129, 20 + r) for r in range(3)])
    files.encode("fp16", "edges", half_edges())
    files.encode("bf16", "edges", bfloat_edges())
    # Saturation under feedback: what did not fit comes later.
    files.feedback("fp16", "feedback_saturates", [
        np.array([70000.0, -1e5, 1.0], F32), np.array([0.0, 0.0, 2.0**-13], F32)])


def onebit(files):
    for n in (1, 7, 8, 9, 64, 129, 1000, 4096, 5000):
        files.encode("onebit", f"l1_n{n}", gradient(n, 30 + n))
    for scaling in ("l2", "two_means", "none"):
        spec = f"onebit(scaling={scaling})"
        for n in (1, 9, 129) + (() if scaling == "none" else (4113,)):
            files.encode(spec, f"{scaling}_n{n}", gradient(n, 40 + n))
    for scaling in ("l1", "l2", "two_means", "none"):
        spec = f"onebit(scaling={scaling})"
        files.encode(spec, f"{scaling}_special", special(129, 2))
        files.encode(spec, f"{scaling}_zeros", np.array([0.0, -0.0] * 10 + [0.0], F32))
        files.encode(spec, f"{scaling}_all_negative", -np.abs(gradient(17, 3)))
        files.encode(spec, f"{scaling}_all_positive", np.abs(gradient(17, 4)))
        files.feedback(spec, f"{scaling}_feedback", [gradient(129, 50 + r) for r in range(4)])
    # Denormals only: their mean is one too, and is not flushed.
    files.encode("onebit", "l1_denormals", np.array([1e-40, -3e-40, 2e-42, 0.0], F32))
    # Values for which the order of additions shows in the scale.
    files.encode("onebit", "l1_order", np.array(
        [F32(2.0**24) if i % 33 == 0 else F32(1.0 + (i % 5)) for i in range(1000)], F32))
    files.encode("onebit(block=4096,scaling=two_means)", "two_means_block_n4113",
                 gradient(4113, 6))
    files.encode("onebit(block=4096)", "l1_block_n1000", gradient(1000, 5))
    files.feedback("onebit", "l1_feedback_n513", [special(513, 60 + r) for r in range(3)])
    # A round of zeros still delivers what is left of the round before.
    files.feedback("onebit", "l1_feedback_zeros",
                   [gradient(65, 7), np.zeros(65, F32), np.zeros(65, F32)])

    payload = make_codec("onebit").encode(gradient(9, 8))
    files.refuse_sizes("onebit", "l1_size", 9, payload)
    for name, bits in (("nan", 0x7FC00000), ("inf", 0x7F800000), ("minus_inf", 0xFF800000)):
        files.refuse("onebit", f"l1_scale_{name}", 9, struct.pack("<I", bits) + payload[4:])
    payload = make_codec("onebit(scaling=two_means)").encode(gradient(9, 8))
    files.refuse_sizes("onebit(scaling=two_means)", "two_means_size", 9, payload)
    files.refuse("onebit(scaling=two_means)", "two_means_second_scale_nan", 9,
                 payload[:4] + struct.pack("<I", 0x7FC00000) + payload[8:])
    spec = "onebit(block=4096)"
    payload = make_codec(spec).encode(gradient(4113, 5))
    files.refuse_sizes(spec, "l1_block_size", 4113, payload)
    files.refuse(spec, "l1_block_second_scale_inf", 4113,
                 payload[:4] + struct.pack("<I", 0x7F800000) + payload[8:])


def topk(files):
    for n in (1, 7, 8, 9, 64, 129, 1000):
        files.encode("topk(ratio=0.1)", f"n{n}", gradient(n, 70 + n))
    files.encode("topk(ratio=0.01)", "n5000", gradient(5000, 71))
    for value in ("fp16", "fp32"):
        for index in ("packed", "u32"):
            spec = f"topk(index={index},k=12,value={value})"
            files.encode(spec, f"{value}_{index}", gradient(129, 73))
            files.encode(spec, f"{value}_{index}_special", special(129, 74))
            files.feedback(spec, f"{value}_{index}_feedback",
                           [gradient(129, 80 + r) for r in range(4)])
    files.encode("topk(k=500)", "k_beyond_n", gradient(9, 75))
    files.encode("topk(k=5)", "all_equal", np.array([0.5, -0.5] * 10, F32))
    files.encode("topk(k=3)", "all_zero", np.zeros(9, F32))
    files.encode("topk(k=4,value=fp32)", "negative_zero",
                 np.array([0.0, -0.0, 1.0, 0.0, -0.0], F32))
    files.encode("topk(k=3,value=fp32)", "denormals",
                 np.array([1e-40, -2e-40, 0.0, 1.4e-45, 3e-40, -1e-45], F32))
    files.encode("topk(k=6)", "fp16_overflow",
                 np.array([1.0, 70000.0, -1e6, 65519.0, 65520.0, -3e38, 0.5], F32))
    # Half of n * ratio rounds up: 2.5 -> 3.
    files.encode("topk(ratio=0.25)", "ratio_half", gradient(10, 76))
    # Every element kept: gaps of width 0.
    files.encode("topk(ratio=1)", "all_kept", gradient(130, 77))
    # More than one block of gaps, the second with other widths than the first.
    files.encode("topk(k=200)", "two_gap_blocks",
                 sparse(900, list(range(0, 128)) + list(range(130, 850, 10))))
    # Gaps of 10 and 11 bits.
    files.encode("topk(k=3)", "wide_gaps_10", sparse(1000, [3, 400, 999]))
    files.encode("topk(k=2)", "wide_gaps_11", sparse(1500, [0, 1400]))

    packed = "topk(k=3)"
    wide = sparse(1000, [3, 400, 999])
    payload = make_codec(packed).encode(wide)
    files.refuse_sizes(packed, "packed_size", 1000, payload)
    values = payload[:6]
    files.refuse(packed, "packed_width_33", 1000,
                 values + bytes([33]) + bytes((3 * 33 + 7) // 8))
    files.refuse(packed, "packed_width_255", 1000, values + bytes([255]) + bytes(96))
    # The last index is n, then far beyond; with 32-bit gaps the sum of indices passes 2^32.
    files.refuse(packed, "packed_index_n", 1000, values + pack_gaps([3, 396, 599]))
    files.refuse(packed, "packed_first_index_n", 1000, values + pack_gaps([1000, 0, 0]))
    files.refuse(packed, "packed_index_wraps", 1000,
                 values + pack_gaps([0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF]))
    files.refuse(packed, "packed_no_gaps", 1000, values)
    plain = "topk(index=u32,k=3)"
    payload = make_codec(plain).encode(wide)
    files.refuse_sizes(plain, "u32_size", 1000, payload)
    files.refuse(plain, "u32_index_n", 1000, payload[:-4] + struct.pack("<I", 1000))
    files.refuse(plain, "u32_index_max", 1000, payload[:-4] + struct.pack("<I", 0xFFFFFFFF))


def generate():
    files = Files()
    casts(files)
    onebit(files)
    topk(files)
    return files.contents


def main():
    default = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/compressors"
    parser = argparse.ArgumentParser(description="Writes or checks the golden files of codecs.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the files")
    action.add_argument("--check", action="store_true", help="compare with the files there are")
    parser.add_argument("dir", nargs="?", type=pathlib.Path, default=default)
    arguments = parser.parse_args()

    contents = generate()
    if arguments.write:
        for name, content in contents.items():
            path = arguments.dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        print(f"{len(contents)} files, {sum(map(len, contents.values()))} bytes")
        return 0

    faults = []
    for name, content in sorted(contents.items()):
        path = arguments.dir / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.read_bytes() != content:
            faults.append(f"{name} differs from what the reference makes")
    for codec in CODECS:
        for path in sorted((arguments.dir / codec).glob("*")):
            if f"{codec}/{path.name}" not in contents:
                faults.append(f"{codec}/{path.name} is not made by the reference")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(contents)} files checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
