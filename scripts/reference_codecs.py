#!/usr/bin/python3
"""An independent second implementation of the codecs, in NumPy, for golden files.

Written from the description of the formats alone, so that a misreading in the C++ codecs cannot
hide in the files they are tested against.

  reference_codecs.py --write [DIR]   writes the golden files
  reference_codecs.py --check [DIR]   regenerates them in memory and compares; exit code 1 names
                                      what differs, is missing or is not ours

DIR defaults to tests/golden/compressors. A case is a few files in DIR/<codec>/:
  <case>.spec      line 1: the compressor, "topk(ratio=0.01)"; line 2: n;
                   line 3: "encode", "refuse" or "feedback rounds=R"; after encode and feedback
                   optionally "seed=S" and "shared=T", u64, 0 if not given: the stream seed and
                   the shared seed; round r of a feedback case (from 0) has S + r and T + r;
                   after encode also "same_choice=1": the values are a sum of payloads of this
                   compressor with this shared seed
  <case>.in        f32[n]; feedback: f32[R * n]                   (not for refuse)
  <case>.bin       the payload; feedback: R times u32 length, payload
  <case>.out       what it decodes to, f32[n]; feedback: f32[R * n]   (not for refuse)
  <case>.residual  f32[n], the explicit residual after the last round   (feedback only)
All numbers are little-endian. Feedback: q = g + e, payload of q, e = q - C(q), all in float32.
"""

import argparse
import dataclasses
import pathlib
import struct
import sys

import numpy as np

F32 = np.float32
BLOCK = 4096
LANES = 16
GAP_BLOCK = 128
LARGEST = np.finfo(F32).max


@dataclasses.dataclass(frozen=True)
class Context:
    """What encoding and decoding depend on beside the values and the parameters."""
    seed: int = 0           # of the stream: rounding draws
    shared: int = 0         # of choices that all workers make alike
    same_choice: int = 0    # 1: the values are a sum of payloads with this choice
    feedback: bool = False


PLAIN = Context()


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


def double_sum_of_squares(values):
    """Sum of squares in the same order as lane_sum, but in float64 throughout."""
    total = 0.0
    for start in range(0, len(values), BLOCK):
        block = values[start:start + BLOCK].astype(np.float64)
        lanes = np.zeros(LANES, np.float64)
        for row in range(0, len(block), LANES):
            part = block[row:row + LANES]
            lanes[:len(part)] = lanes[:len(part)] + part * part
        block_sum = 0.0
        for lane in lanes:
            block_sum += float(lane)
        total += block_sum
    return total


def to_float(value):
    """A float64 as float32; what would overflow is the largest float."""
    with np.errstate(over="ignore"):
        return min(F32(value), LARGEST)


def words(counters, seed):
    """word(c) of a stream for each counter, as uint64 below 2^32."""
    mask = np.uint64(0xFFFFFFFF)
    k0 = np.uint64(seed & 0xFFFFFFFF)
    k1 = np.uint64(seed >> 32)
    x = (np.asarray(counters, np.uint64) * np.uint64(0x9E3779B9) + k0) & mask
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    x = x ^ k1
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    return x ^ (x >> np.uint64(16))


def draws(n, seed):
    """U(i) for i in [0, n), float32: exact, they have 17 bits."""
    i = np.arange(n)
    word = words(16 * (i // 32) + i % 16, seed)
    u = np.where(i % 32 < 16, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return ((2 * u.astype(np.int64) + 1) * 2.0**-17).astype(F32)


def round_up(fractions, n, seed):
    """1 where a fraction is rounded up, else 0; int64[n]."""
    assert fractions.dtype == F32
    return (fractions > draws(n, seed)).astype(np.int64)


def split(magnitudes):
    """m = 2^e * (1 + f) for m > 0: (e as int64, f as float32). Exact, for denormals too."""
    half_mantissa, exponent = np.frexp(magnitudes.astype(np.float64))
    return exponent.astype(np.int64) - 1, (2 * half_mantissa - 1).astype(F32)


def pack_codes(codes, bits):
    """Codes of some bits one after the other, the least significant bit first."""
    rows = (codes[:, None] >> np.arange(bits)) & 1
    return np.packbits(rows.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack_codes(data, n, bits):
    assert len(data) == (n * bits + 7) // 8
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    assert not flat[n * bits:].any()
    rows = flat[:n * bits].reshape(n, bits).astype(np.int64)
    return (rows << np.arange(bits)).sum(axis=1)


def signed(magnitudes, negative):
    """Magnitudes with signs, of zeros too."""
    return np.where(negative, -magnitudes, magnitudes).astype(F32)


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
    def encode(self, x, context=PLAIN):
        return x.astype("<f4").tobytes()

    def decode(self, payload, n, context=PLAIN):
        assert len(payload) == 4 * n
        return np.frombuffer(payload, "<f4").astype(F32)


class Fp16Codec:
    def encode(self, x, context=PLAIN):
        return to_half_bits(x).tobytes()

    def decode(self, payload, n, context=PLAIN):
        assert len(payload) == 2 * n
        return from_half_bits(np.frombuffer(payload, "<u2"))


class Bf16Codec:
    def encode(self, x, context=PLAIN):
        bits = x.view(np.uint32).astype(np.uint64)
        low = bits & 0xFFFF
        high = bits >> 16
        up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))
        high = high + up
        infinite = (high & 0x7FFF) == 0x7F80
        return np.where(infinite, high - 1, high).astype("<u2").tobytes()

    def decode(self, payload, n, context=PLAIN):
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

    def encode(self, x, context=PLAIN):
        scales = []
        for begin, end in self.spans(len(x)):
            scales += self.scales(x[begin:end])
        bits = np.packbits(np.signbit(x), bitorder="little")
        return np.array(scales, "<f4").tobytes() + bits.tobytes()

    def decode(self, payload, n, context=PLAIN):
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

    def encode(self, x, context=PLAIN):
        k = self.kept(len(x))
        # A stable sort on descending magnitude keeps the lower index first among equals.
        order = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")
        return pack_sparse(x, np.sort(order[:k]), self.value, self.index)

    def decode(self, payload, n, context=PLAIN):
        return unpack_sparse(payload, self.kept(n), n, self.value, self.index)


class ThresholdCodec:
    def __init__(self, theta="0.01", value="fp16", index="packed"):
        self.theta = F32(theta)
        self.value = value
        self.index = index

    def encode(self, x, context=PLAIN):
        indices = np.flatnonzero(np.abs(x) > self.theta)
        return struct.pack("<I", len(indices)) + pack_sparse(x, indices, self.value, self.index)

    def decode(self, payload, n, context=PLAIN):
        k, = struct.unpack("<I", payload[:4])
        assert k <= n
        return unpack_sparse(payload[4:], k, n, self.value, self.index)


class RandomkCodec:
    def __init__(self, ratio="0.03125", k=None, value="fp32"):
        self.kept = TopkCodec(ratio, k).kept
        self.value = value

    def indices(self, n, seed):
        k = self.kept(n)
        begins = [j * n // k for j in range(k + 1)]
        word = [int(w) for w in words(np.arange(k + 1), seed)]
        turn = word[k] * n >> 32
        positions = [begins[j] + (word[j] * (begins[j + 1] - begins[j]) >> 32) for j in range(k)]
        return sorted((position + turn) % n for position in positions)

    def encode(self, x, context=PLAIN):
        n = len(x)
        kept = x[self.indices(n, context.shared)]
        if not context.feedback and not context.same_choice:
            with np.errstate(over="ignore"):
                kept = np.clip(kept * F32(n / self.kept(n)), -LARGEST, LARGEST)
        return pack_values(kept, self.value)

    def decode(self, payload, n, context=PLAIN):
        out = np.zeros(n, F32)
        out[self.indices(n, context.shared)] = unpack_values(payload, self.kept(n), self.value)
        return out


def pack_values(values, value):
    return values.astype("<f4").tobytes() if value == "fp32" else to_half_bits(values).tobytes()


def unpack_values(data, k, value):
    assert len(data) == k * (4 if value == "fp32" else 2)
    if value == "fp32":
        return np.frombuffer(data, "<f4").astype(F32)
    return from_half_bits(np.frombuffer(data, "<u2"))


def pack_sparse(x, indices, value, index):
    """The values at ascending indices, then the indices."""
    values = pack_values(x[indices], value)
    if index == "u32":
        return values + indices.astype("<u4").tobytes()
    return values + pack_gaps(np.diff(indices.astype(np.int64), prepend=-1) - 1)


def unpack_sparse(payload, k, n, value, index):
    head = k * (4 if value == "fp32" else 2)
    values = unpack_values(payload[:head], k, value)
    rest = payload[head:]
    if index == "u32":
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


class Int8Codec:
    def __init__(self, block="1024", stochastic="false"):
        self.block = int(block)
        self.stochastic = stochastic == "true"

    def scale(self, q):
        s = np.abs(q).max() / F32(127)
        with np.errstate(over="ignore"):
            if np.isinf(F32(127) * s):
                s = np.nextafter(s, F32(0))
        return s if s >= F32(2.0**-126) else F32(0)

    def encode(self, x, context=PLAIN):
        n = len(x)
        scales = []
        levels = np.zeros(n, np.int64)
        draw = draws(n, context.seed)
        for start in range(0, n, self.block):
            q = x[start:start + self.block]
            s = self.scale(q)
            scales.append(s)
            if s == 0:
                continue
            y = q * (F32(1) / s)
            if self.stochastic:
                k = np.floor(y)
                level = k + (y - k > draw[start:start + self.block])
            else:
                level = np.rint(y)
            levels[start:start + self.block] = np.clip(level, -127, 127)
        return np.array(scales, "<f4").tobytes() + levels.astype(np.int8).tobytes()

    def decode(self, payload, n, context=PLAIN):
        blocks = (n + self.block - 1) // self.block
        assert len(payload) == 4 * blocks + n
        scales = np.frombuffer(payload[:4 * blocks], "<f4").astype(F32)
        levels = np.frombuffer(payload[4 * blocks:], np.int8)
        assert (levels > -128).all()
        return levels.astype(F32) * np.repeat(scales, self.block)[:n]


class TwobitCodec:
    def __init__(self, theta="0.5"):
        self.theta = F32(theta)

    def encode(self, x, context=PLAIN):
        codes = np.where(x >= self.theta, 1, np.where(x <= -self.theta, 2, 0))
        return pack_codes(codes, 2)

    def decode(self, payload, n, context=PLAIN):
        codes = unpack_codes(payload, n, 2)
        assert (codes < 3).all()
        return np.array([0, self.theta, -self.theta], F32)[codes]


class NaturalCodec:
    def encode(self, x, context=PLAIN):
        n = len(x)
        magnitude = np.abs(x)
        e, f = split(magnitude)
        above = np.minimum(e + 110 + round_up(f, n, context.seed), 127)
        inside = magnitude >= F32(2.0**-109)
        # Multiplied only below the window: exact there.
        below = round_up(np.where(inside, F32(0), magnitude) * F32(2.0**109), n, context.seed)
        c = np.where(inside, above, below)
        return (c | np.signbit(x).astype(np.int64) << 7).astype(np.uint8).tobytes()

    def decode(self, payload, n, context=PLAIN):
        assert len(payload) == n
        codes = np.frombuffer(payload, np.uint8).astype(np.int64)
        c = codes & 127
        magnitude = np.where(c == 0, 0.0, 2.0**(c - 110.0)).astype(F32)
        return signed(magnitude, codes >= 128)


class TerngradCodec:
    def __init__(self, clip="2.5"):
        self.clip = F32(clip)

    def encode(self, x, context=PLAIN):
        n = len(x)
        magnitude = np.abs(x)
        limit = F32(np.inf)
        if self.clip != 0:
            sigma = to_float(np.sqrt(np.float64(double_sum_of_squares(x) / n)))
            with np.errstate(over="ignore"):
                limit = self.clip * sigma
        s = min(magnitude.max(), limit)
        with np.errstate(over="ignore", divide="ignore"):
            r = F32(1) / s
        trits = np.zeros(n, np.int64)
        if s == 0 or np.isinf(r):
            s = F32(0)
        else:
            p = np.minimum(magnitude, limit) * r
            trits = round_up(p, n, context.seed) * np.where(np.signbit(x), 2, 1)
        rows = np.zeros((n + 4) // 5 * 5, np.int64)
        rows[:n] = trits
        digits = rows.reshape(-1, 5) @ np.array([1, 3, 9, 27, 81])
        return struct.pack("<f", s) + digits.astype(np.uint8).tobytes()

    def decode(self, payload, n, context=PLAIN):
        assert len(payload) == 4 + (n + 4) // 5
        s = np.frombuffer(payload[:4], "<f4").astype(F32)[0]
        digits = np.frombuffer(payload[4:], np.uint8).astype(np.int64)
        assert (digits < 243).all()
        trits = (digits[:, None] // np.array([1, 3, 9, 27, 81]) % 3).reshape(-1)
        assert not trits[n:].any()
        return np.array([0, s, -s], F32)[trits[:n]]


class DitheringCodec:
    def __init__(self, bits="5", levels="linear", norm="max"):
        self.bits = int(bits)
        self.natural = levels == "natural"
        self.norm = norm
        self.s = 2**(self.bits - 1) - 1
        if self.natural:
            self.s = min(self.s, 127)

    def levels(self, magnitude, r, seed):
        n = len(magnitude)
        s = self.s
        with np.errstate(over="ignore"):
            scaled = np.minimum(magnitude * r, F32(1 if self.natural else s))
        if not self.natural:
            k = np.floor(scaled)
            return k.astype(np.int64) + round_up(scaled - k, n, seed)
        e, f = split(scaled)
        inside = scaled >= F32(2.0**(1 - s))
        below = round_up(np.where(inside, F32(0), scaled) * F32(2.0**(s - 1)), n, seed)
        return np.where(inside, e + s + round_up(f, n, seed), below)

    def encode(self, x, context=PLAIN):
        magnitude = np.abs(x)
        if self.norm == "l2":
            norm = to_float(np.sqrt(np.float64(double_sum_of_squares(x))))
        else:
            norm = magnitude.max()
        codes = np.zeros(len(x), np.int64)
        with np.errstate(over="ignore", divide="ignore"):
            r = F32(1 if self.natural else self.s) / norm
        if norm == 0 or np.isinf(r):
            norm = F32(0)
        else:
            level = self.levels(magnitude, r, context.seed)
            codes = np.signbit(x).astype(np.int64) | level << 1
        return struct.pack("<f", norm) + pack_codes(codes, self.bits)

    def decode(self, payload, n, context=PLAIN):
        norm = np.frombuffer(payload[:4], "<f4").astype(F32)[0]
        codes = unpack_codes(payload[4:], n, self.bits)
        level = codes >> 1
        assert (level <= self.s).all()
        if self.natural:
            factor = np.where(level == 0, 0.0, 2.0**(level - float(self.s))).astype(F32)
            return signed(norm * factor, codes & 1)
        s = F32(self.s)
        step = norm / s
        with np.errstate(over="ignore"):
            if np.isinf(s * step):
                step = np.nextafter(step, F32(0))
        return signed(level.astype(F32) * step, codes & 1)


CODECS = {"none": NoneCodec, "fp16": Fp16Codec, "bf16": Bf16Codec, "onebit": OnebitCodec,
          "topk": TopkCodec, "int8": Int8Codec, "twobit": TwobitCodec, "natural": NaturalCodec,
          "terngrad": TerngradCodec, "dithering": DitheringCodec, "randomk": RandomkCodec,
          "threshold": ThresholdCodec}


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

    def encode(self, spec, case, x, **words):
        codec = make_codec(spec)
        context = Context(**words)
        payload = codec.encode(x, context)
        out = codec.decode(payload, len(x), context)
        kind = " ".join(["encode"] + [f"{name}={value}" for name, value in words.items()])
        self.put(spec.partition("(")[0], case, len(x), spec, kind, **{
            "in": x.astype("<f4").tobytes(), "bin": payload, "out": out.astype("<f4").tobytes()})
        return payload

    def feedback(self, spec, case, rounds, **seeds):
        codec = make_codec(spec)
        n = len(rounds[0])
        residual = np.zeros(n, F32)
        payloads = b""
        outs = b""
        for r, g in enumerate(rounds):
            context = Context(feedback=True, **{name: seed + r for name, seed in seeds.items()})
            q = g + residual
            payload = codec.encode(q, context)
            out = codec.decode(payload, n, context)
            residual = q - out
            payloads += struct.pack("<I", len(payload)) + payload
            outs += out.astype("<f4").tobytes()
        kind = " ".join([f"feedback rounds={len(rounds)}"] +
                        [f"{name}={seed}" for name, seed in seeds.items()])
        self.put(spec.partition("(")[0], case, n, spec, kind, **{
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
    refuse_scales(files, "onebit", "l1_scale", 9, payload)
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
    # One content has one payload.
    wider = sum(gap << (11 * i) for i, gap in enumerate([3, 396, 598]))
    files.refuse(packed, "packed_width_not_least", 1000,
                 values + bytes([11]) + wider.to_bytes(5, "little"))
    payload = values + pack_gaps([3, 396, 598])
    files.refuse(packed, "packed_unused_bits", 1000, with_byte(payload, -1, payload[-1] | 0x80))
    files.refuse(packed, "packed_width_1_of_zeros", 1000, values + bytes([1, 0]))
    files.refuse(plain, "u32_twice", 1000, values + struct.pack("<III", 3, 400, 400))
    files.refuse(plain, "u32_descends", 1000, values + struct.pack("<III", 400, 3, 999))


SIZES = (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000)
LARGE_SIZES = (4097, 8209)
SEED = 0x0123456789ABCDEF
SHARED = 0xFEDCBA9876543210
BAD_SCALES = {"negative": 0xBF800000, "minus_zero": 0x80000000, "nan": 0x7FC00000,
              "inf": 0x7F800000, "minus_inf": 0xFF800000}


def floats(bits):
    return np.array(bits, np.uint32).view(F32)


def with_negatives(values):
    positive = np.array(values, F32)
    return np.concatenate([positive, -positive])


def refuse_scales(files, spec, case, n, payload, at=0):
    for name, bits in BAD_SCALES.items():
        files.refuse(spec, f"{case}_{name}", n,
                     payload[:at] + struct.pack("<I", bits) + payload[at + 4:])


def with_byte(payload, at, byte):
    result = bytearray(payload)
    result[at] = byte
    return bytes(result)


HUGE = floats([0x7F7FFFFF, 0xFF7FFFFF, 0x7F7FFFFE, 0x7F000000, 0xFE800000, 0x3F800000, 0,
               0x80000000, 0x7D7FFFFF])
ZEROS = np.array([0.0, -0.0] * 10 + [0.0], F32)
DENORMALS = floats([1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x400000, 0x80123456, 0, 0x80000000])


def order_of_squares():
    """Values whose root of the sum of squares is a float tie, (2^24 + 1), if the small ones are
    lost where they are added to a large one, and above it where another lane gathers them."""
    squares = {}
    for name, lanes in (("all_lanes", range(16)), ("lane_0", [0]), ("lane_8", [8])):
        values = np.zeros(256, F32)
        for lane in lanes:
            values[lane::16] = F32(2.0**-3)
        values[[0, 16, 32, 48]] = np.array([2.0**24, 2.0**12, -2.0**12, 1.0], F32)
        squares[name] = values
    return squares


def int8(files):
    for n in SIZES + (4097,):
        files.encode("int8", f"n{n}", gradient(n, 100 + n))
    stochastic = "int8(stochastic=true)"
    for n in (1, 9, 31, 32, 33, 129, 1000):
        files.encode(stochastic, f"stochastic_n{n}", gradient(n, 200 + n), seed=SEED + n)
    files.encode("int8(block=8192,stochastic=true)", "stochastic_block8192_n8209",
                 gradient(8209, 101), seed=SEED)
    for flag in ("false", "true"):
        spec = f"int8(block=32,stochastic={flag})"
        files.encode(spec, f"block32_{flag}_n129", gradient(129, 102), seed=SEED)
        files.encode(spec, f"block32_{flag}_n1000", gradient(1000, 103), seed=SEED)
        files.encode(spec, f"block32_{flag}_special", special(129, 104), seed=SEED)
        files.encode(spec, f"block32_{flag}_zeros", ZEROS, seed=SEED)
        files.encode(spec, f"block32_{flag}_huge", HUGE, seed=SEED)
        files.encode(spec, f"block32_{flag}_denormals", DENORMALS, seed=SEED)
        # The largest is 127: every scale is 1 and levels are the values, ties among them.
        ties = with_negatives([127.0, 0.5, 1.5, 2.5, 126.5, 125.5, 0.25, 0.75, 0.49999997])
        files.encode(spec, f"block32_{flag}_ties", ties, seed=SEED)
        # Around the largest magnitude whose scale underflows, a block each; the rest is zero.
        least = struct.unpack("<I", struct.pack("<f", 127 * 2.0**-126))[0]
        edges = np.zeros(5 * 32, F32)
        edges[::32] = floats([least - 2, least - 1, least, least + 1, least + 2])
        edges[1::32] = F32(2.0**-130)
        files.encode(spec, f"block32_{flag}_scale_underflow", edges, seed=SEED)
        # Scales from many mantissas, so that 127 s differs from the largest in both directions.
        scales = np.zeros(16 * 32, F32)
        scales[::32] = gradient(16, 105)
        scales[1::32] = -scales[::32]
        files.encode(spec, f"block32_{flag}_scales", scales, seed=SEED)
        files.feedback(spec, f"block32_{flag}_feedback",
                       [gradient(129, 110 + r) for r in range(4)], seed=SEED)
    # Near the largest float, of many mantissas: 127 s must not be infinite.
    near = np.zeros(16 * 32, F32)
    near[::32] = floats([0x7F7FFFFF - i for i in range(16)])
    files.encode("int8(block=32)", "block32_near_largest", near)
    files.feedback("int8", "feedback", [special(513, 120 + r) for r in range(3)])

    spec = "int8(block=32)"
    payload = files.encode(spec, "block32_n65", gradient(65, 106))
    files.refuse_sizes(spec, "size", 65, payload)
    refuse_scales(files, spec, "first_scale", 65, payload)
    refuse_scales(files, spec, "last_scale", 65, payload, at=8)
    # The least scale that 127 times is infinite.
    too_large = F32(HUGE[0]) / F32(127)
    with np.errstate(over="ignore"):
        while not np.isinf(F32(127) * too_large):
            too_large = np.nextafter(too_large, F32(np.inf))
    files.refuse(spec, "last_scale_too_large", 65, payload[:8] + too_large.tobytes() + payload[12:])
    files.refuse(spec, "first_level_minus_128", 65, with_byte(payload, 12, 0x80))
    files.refuse(spec, "last_level_minus_128", 65, with_byte(payload, 12 + 64, 0x80))


def twobit(files):
    for n in SIZES + LARGE_SIZES:
        files.encode("twobit(theta=0.01)", f"n{n}", gradient(n, 300 + n))
    edges = floats([0x3F000000, 0x3EFFFFFF, 0x3F000001, 0xBF000000, 0xBEFFFFFF, 0xBF000001, 0,
                    0x80000000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF])
    files.encode("twobit", "edges", edges)
    files.encode("twobit(theta=0.25)", "special", special(129, 301))
    files.encode("twobit", "zeros", ZEROS)
    files.feedback("twobit(theta=0.01)", "feedback", [gradient(129, 310 + r) for r in range(5)])
    files.feedback("twobit(theta=0.25)", "feedback_special",
                   [special(513, 320 + r) for r in range(3)])

    spec = "twobit(theta=0.01)"
    payload = make_codec(spec).encode(gradient(9, 302))
    files.refuse_sizes(spec, "size", 9, payload)
    files.refuse(spec, "code_3_first", 9, with_byte(payload, 0, payload[0] | 3))
    files.refuse(spec, "code_3_last", 9, with_byte(payload, 2, 3))
    files.refuse(spec, "unused_bits", 9, with_byte(payload, 2, payload[2] | 4))
    files.refuse(spec, "unused_top_bit", 9, with_byte(payload, 2, payload[2] | 0x80))
    payload = make_codec(spec).encode(gradient(1000, 303))
    files.refuse(spec, "code_3_middle", 1000, with_byte(payload, 130, payload[130] | 0x30))


def natural(files):
    for n in SIZES + LARGE_SIZES:
        files.encode("natural", f"n{n}", gradient(n, 400 + n), seed=SEED + n)
    for seed in (0, 1, 1 << 32, (1 << 64) - 1):
        files.encode("natural", f"seed_{seed}", gradient(129, 401), seed=seed)
    files.encode("natural", "special", special(129, 402), seed=SEED)
    files.encode("natural", "zeros", ZEROS, seed=SEED)
    files.encode("natural", "denormals", DENORMALS, seed=SEED)
    # Both ends of the window, 2^-109 and 2^17, at and next to powers of two.
    exponents = [-149, -126, -112, -111, -110, -109, -108, -1, 0, 1, 15, 16, 17, 18, 127]
    mantissas = [1.0, 1.0 + 2.0**-23, 1.0 + 2.0**-17, 1.25, 1.5, 1.75, 2.0 - 2.0**-17,
                 2.0 - 2.0**-23]
    files.encode("natural", "window", with_negatives(
        [m * 2.0**e for e in exponents for m in mantissas]), seed=SEED)
    # Fractions on all sides of the draws: the same value many times.
    files.encode("natural", "thirds", np.full(300, F32(4 / 3)), seed=SEED)
    # Fractions equal to a draw and next to it: a draw itself does not round up.
    draw = draws(64, SEED).astype(np.float64)
    for name, step in (("at", 0.0), ("above", 2.0**-23), ("below", -2.0**-23)):
        files.encode("natural", f"{name}_the_draws", (1 + draw + step).astype(F32), seed=SEED)
    files.feedback("natural", "feedback", [gradient(129, 410 + r) for r in range(4)], seed=SEED)
    files.feedback("natural", "feedback_carries", [gradient(65, 420 + r) for r in range(3)],
                   seed=0xFFFFFFFF)
    payload = make_codec("natural").encode(gradient(9, 403))
    files.refuse_sizes("natural", "size", 9, payload)


def terngrad(files):
    for n in SIZES + (4097,):
        files.encode("terngrad", f"n{n}", gradient(n, 500 + n), seed=SEED + n)
    files.encode("terngrad(clip=0)", "clip0_n8209", gradient(8209, 501), seed=SEED)
    for clip in ("0", "1", "2.5"):
        spec = f"terngrad(clip={clip})"
        for n in range(1, 7):
            files.encode(spec, f"clip{clip}_n{n}", gradient(n, 510 + n), seed=SEED + n)
        files.encode(spec, f"clip{clip}_n129", gradient(129, 502), seed=SEED)
        files.encode(spec, f"clip{clip}_special", special(129, 503), seed=SEED)
        files.encode(spec, f"clip{clip}_zeros", ZEROS, seed=SEED)
        files.encode(spec, f"clip{clip}_huge", HUGE, seed=SEED)
        files.encode(spec, f"clip{clip}_denormals", DENORMALS, seed=SEED)
        # One large element: clipped if there is a limit.
        outlier = gradient(129, 504)
        outlier[77] = F32(-1000.0)
        files.encode(spec, f"clip{clip}_outlier", outlier, seed=SEED)
        # The least scale whose reciprocal is finite, and the one below it.
        for name, bits in (("finite", 0x00200001), ("infinite", 0x00200000)):
            files.encode(spec, f"clip{clip}_{name}_reciprocal",
                         floats([bits, bits | 0x80000000] * 4), seed=SEED)
        # Squares below the range of floats.
        files.encode(spec, f"clip{clip}_small", gradient(65, 505) * F32(2.0**-90), seed=SEED)
        files.encode(spec, f"clip{clip}_equal", with_negatives([0.375] * 33), seed=SEED)
    for name, values in order_of_squares().items():
        files.encode("terngrad(clip=1)", f"order_{name}", values, seed=SEED)
    payload = make_codec("terngrad").encode(gradient(9, 506))
    files.refuse_sizes("terngrad", "size", 9, payload)
    refuse_scales(files, "terngrad", "scale", 9, payload)
    files.refuse("terngrad", "byte_243", 9, with_byte(payload, 4, 243))
    files.refuse("terngrad", "byte_255", 9, with_byte(payload, 4, 255))
    files.refuse("terngrad", "last_byte_243", 9, with_byte(payload, 5, 243))
    files.refuse("terngrad", "missing_trit", 9, with_byte(payload, 5, payload[5] % 81 + 81))
    files.refuse("terngrad", "missing_trits", 6, payload[:4] + bytes([0, 3]))


def dithering(files):
    for n in SIZES + (4097,):
        files.encode("dithering", f"n{n}", gradient(n, 600 + n), seed=SEED + n)
    files.encode("dithering(bits=3,levels=natural,norm=l2)", "natural_l2_bits3_n8209",
                 gradient(8209, 601), seed=SEED)
    for levels in ("linear", "natural"):
        for norm in ("max", "l2"):
            name = f"{levels}_{norm}"
            for bits in range(2, 17):
                files.encode(f"dithering(bits={bits},levels={levels},norm={norm})",
                             f"{name}_bits{bits}", gradient(35, 610 + bits), seed=SEED + bits)
            for bits in (3, 9):
                spec = f"dithering(bits={bits},levels={levels},norm={norm})"
                base = f"{name}_bits{bits}"
                files.encode(spec, f"{base}_special", special(129, 602), seed=SEED)
                files.encode(spec, f"{base}_zeros", ZEROS, seed=SEED)
                files.encode(spec, f"{base}_huge", HUGE, seed=SEED)
                files.encode(spec, f"{base}_denormals", DENORMALS, seed=SEED)
                # Squares below and above the range of floats.
                files.encode(spec, f"{base}_small", gradient(33, 603) * F32(2.0**-90), seed=SEED)
                files.encode(spec, f"{base}_large", gradient(33, 603) * F32(2.0**120), seed=SEED)
                # Norms around the least with a finite reciprocal (times s).
                for i, bits_of in enumerate([0x00200000, 0x00200001, 0x00400000, 0x00800000,
                                             0x03FBFFFF, 0x03FC0001]):
                    files.encode(spec, f"{base}_small_norm{i}",
                                 floats([bits_of, 0x80000000 | bits_of >> 1, 0x80000000]),
                                 seed=SEED)
            # n where the order of the sum and its precision show.
            files.encode(f"dithering(bits=8,levels={levels},norm={norm})", f"{name}_order",
                         np.array([F32(2.0**12) if i % 33 == 0 else F32(1.0 + (i % 5))
                                   for i in range(500)], F32), seed=SEED)
    for name, values in order_of_squares().items():
        files.encode("dithering(norm=l2)", f"order_{name}", values, seed=SEED)
    # Powers of two and their neighbours, down to the lowest level and below it.
    powers = with_negatives([m * 2.0**-e for e in list(range(0, 9)) + [62, 63, 124, 125, 126, 127]
                             for m in (1.0, 1.0 - 2.0**-24, 0.75)])
    for bits in (2, 3, 4, 8, 16):
        files.encode(f"dithering(bits={bits},levels=natural)", f"natural_powers_bits{bits}",
                     powers, seed=SEED)
    # Multiples of the step: fractions of 0 do not round up.
    files.encode("dithering(bits=4)", "multiples", with_negatives(range(8)), seed=SEED)
    files.feedback("dithering(bits=8)", "feedback", [gradient(129, 650 + r) for r in range(3)],
                   seed=SEED)
    files.feedback("dithering(bits=8,levels=natural)", "feedback_natural",
                   [gradient(129, 660 + r) for r in range(3)], seed=SEED)

    for levels in ("linear", "natural"):
        spec = f"dithering(bits=5,levels={levels})"
        payload = make_codec(spec).encode(gradient(9, 604))
        files.refuse_sizes(spec, f"{levels}_size", 9, payload)
        refuse_scales(files, spec, f"{levels}_norm", 9, payload)
        files.refuse(spec, f"{levels}_unused_bits", 9, with_byte(payload, -1, payload[-1] | 0x20))
        files.refuse(spec, f"{levels}_unused_top_bit", 9,
                     with_byte(payload, -1, payload[-1] | 0x80))
    # Only natural levels can be above s: with 9 bits or more.
    for bits in (9, 12, 16):
        codes = np.array([2 * 127, 2 * 127 + 1, 2 * 128, 0, 1], np.int64)
        spec = f"dithering(bits={bits},levels=natural)"
        files.refuse(spec, f"natural_level_128_bits{bits}", 5,
                     struct.pack("<f", 1.0) + pack_codes(codes, bits))
        codes[2] = 2**bits - 1
        files.refuse(spec, f"natural_level_last_bits{bits}", 5,
                     struct.pack("<f", 1.0) + pack_codes(codes, bits))


def randomk(files):
    for n in SIZES + LARGE_SIZES:
        files.encode("randomk", f"n{n}", gradient(n, 700 + n), shared=SHARED + n)
    for seed in (0, 1, 1 << 32, (1 << 64) - 1):
        files.encode("randomk(k=7)", f"seed_{seed}", gradient(65, 701), shared=seed)
    for value in ("fp16", "fp32"):
        for n in (1, 9, 129):
            spec = f"randomk(ratio=0.1,value={value})"
            files.encode(spec, f"{value}_ratio_n{n}", gradient(n, 702), shared=SHARED)
            spec = f"randomk(k=9,value={value})"
            files.encode(spec, f"{value}_k9_n{n}", gradient(n, 703), shared=SHARED)
        spec = f"randomk(k=40,value={value})"
        files.encode(spec, f"{value}_special", special(129, 704), shared=SHARED)
        files.encode(spec, f"{value}_zeros", ZEROS, shared=SHARED)
        files.encode(spec, f"{value}_denormals", DENORMALS, shared=SHARED)
        files.feedback(f"randomk(k=12,value={value})", f"{value}_feedback",
                       [gradient(129, 710 + r) for r in range(6)], shared=SHARED)
        # All kept: the factor is 1, and windows have one element.
        files.encode(f"randomk(ratio=1,value={value})", f"{value}_all", gradient(130, 705),
                     shared=SHARED)
        # The factor of 3 leaves the range of floats.
        files.encode(f"randomk(k=3,value={value})", f"{value}_huge", np.resize(HUGE[:5], 9),
                     shared=SHARED)
        # A downlink of the uplink's compressor: the sum of two payloads, as it is.
        spec = f"randomk(k=12,value={value})"
        codec = make_codec(spec)
        context = Context(shared=SHARED)
        total = np.zeros(129, F32)
        for worker in range(2):
            payload = codec.encode(gradient(129, 730 + worker), context)
            total = total + codec.decode(payload, 129, context)
        files.encode(spec, f"{value}_same_choice", total, shared=SHARED, same_choice=1)
    # The stream seed has no part in it.
    files.encode("randomk(k=5)", "stream_seed", gradient(64, 706), seed=SEED, shared=SHARED)
    # Saturates as float16, after the factor of 4.
    files.encode("randomk(k=2,value=fp16)", "fp16_overflow",
                 np.array([65504, -65504, 16376, -16380, 1e6, -3e4, 1, -1], F32), shared=SHARED)
    # Windows of two sizes; the factor n / k is rounded.
    for n, k in ((10, 3), (100, 7), (1000, 999), (7, 6)):
        files.encode(f"randomk(k={k})", f"k{k}_of_{n}", gradient(n, 707), shared=SHARED)
    files.encode("randomk(ratio=0.25)", "ratio_half", gradient(10, 708), shared=SHARED)
    files.feedback("randomk", "feedback_special", [special(129, 720 + r) for r in range(3)],
                   shared=(1 << 32) - 2)
    for value in ("fp16", "fp32"):
        spec = f"randomk(k=3,value={value})"
        payload = make_codec(spec).encode(gradient(100, 709))
        files.refuse_sizes(spec, f"{value}_size", 100, payload)


def threshold(files):
    for n in SIZES + LARGE_SIZES:
        files.encode("threshold(theta=0.003)", f"n{n}", gradient(n, 800 + n))
    for value in ("fp16", "fp32"):
        for index in ("packed", "u32"):
            name = f"{value}_{index}"
            for case, theta in (("some", "0.001"), ("none", "1000"), ("all", "0.000001")):
                spec = f"threshold(index={index},theta={theta},value={value})"
                files.encode(spec, f"{name}_{case}", gradient(129, 801))
            spec = f"threshold(index={index},theta=0.1,value={value})"
            files.encode(spec, f"{name}_special", special(129, 802))
            files.encode(spec, f"{name}_zeros", ZEROS)
            files.encode(spec, f"{name}_huge", HUGE)
            spec = f"threshold(index={index},theta=0.002,value={value})"
            files.feedback(spec, f"{name}_feedback", [gradient(129, 810 + r) for r in range(4)])
    files.encode("threshold", "defaults", gradient(129, 803))
    # At theta is not above it.
    files.encode("threshold(theta=0.5)", "edges", floats(
        [0x3F000000, 0x3EFFFFFF, 0x3F000001, 0xBF000000, 0xBEFFFFFF, 0xBF000001, 0]))
    files.encode("threshold(theta=0.5)", "two_gap_blocks",
                 sparse(900, list(range(0, 128)) + list(range(130, 850, 10))))
    # Rounds in which nothing is kept, then what has gathered.
    files.feedback("threshold(theta=0.05)", "feedback_gathers",
                   [gradient(65, 820)] * 8)

    wide = sparse(1000, [3, 400, 999])
    for index in ("packed", "u32"):
        spec = f"threshold(index={index},theta=0.5)"
        payload = make_codec(spec).encode(wide)
        files.refuse_sizes(spec, f"{index}_size", 1000, payload)
        files.refuse(spec, f"{index}_no_count", 1000, payload[:3])
        files.refuse(spec, f"{index}_count_2", 1000, struct.pack("<I", 2) + payload[4:])
        files.refuse(spec, f"{index}_count_4", 1000, struct.pack("<I", 4) + payload[4:])
        files.refuse(spec, f"{index}_count_0", 1000, struct.pack("<I", 0) + payload[4:])
        files.refuse(spec, f"{index}_count_max", 1000,
                     struct.pack("<I", 0xFFFFFFFF) + payload[4:])
        # One more than there are elements, with the bytes that would take.
        files.refuse(spec, f"{index}_count_above_n", 2, struct.pack("<I", 3) + bytes(6) + (
            pack_gaps([0, 0, 0]) if index == "packed" else struct.pack("<III", 0, 1, 2)))
    spec = "threshold(theta=0.5)"
    head = make_codec(spec).encode(wide)[:10]
    files.refuse(spec, "packed_index_n", 1000, head + pack_gaps([3, 396, 599]))
    files.refuse(spec, "packed_index_wraps", 1000, head + pack_gaps([0xFFFFFFFF] * 3))
    files.refuse(spec, "packed_width_33", 1000, head + bytes([33]) + bytes((3 * 33 + 7) // 8))
    # Gaps of 10 bits at a width of 11; a bit behind the last gap.
    wider = sum(gap << (11 * i) for i, gap in enumerate([3, 396, 598]))
    files.refuse(spec, "packed_width_not_least", 1000,
                 head + bytes([11]) + wider.to_bytes(5, "little"))
    packed = head + pack_gaps([3, 396, 598])
    files.refuse(spec, "packed_unused_bits", 1000, with_byte(packed, -1, packed[-1] | 0x80))
    spec = "threshold(index=u32,theta=0.5)"
    files.refuse(spec, "u32_index_n", 1000, head + struct.pack("<III", 3, 400, 1000))
    files.refuse(spec, "u32_twice", 1000, head + struct.pack("<III", 3, 400, 400))
    files.refuse(spec, "u32_descends", 1000, head + struct.pack("<III", 400, 3, 999))


def generate():
    files = Files()
    casts(files)
    onebit(files)
    topk(files)
    int8(files)
    twobit(files)
    natural(files)
    terngrad(files)
    dithering(files)
    randomk(files)
    threshold(files)
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
    for path in sorted(arguments.dir.rglob("*")):
        name = path.relative_to(arguments.dir).as_posix()
        if path.is_file() and name not in contents:
            faults.append(f"{name} is not made by the reference")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(contents)} files checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
