// The transforms and the checksum of FORMAT.md on the GPU. kernels.py launches these; transforms.py is the same in NumPy.
//
// A launch works on the chunks of one tile: blockIdx.y is the chunk, a thread takes 16 consecutive elements of it. Pieces start on
// 16 bytes in every buffer of ours, so full groups move in 16-byte words; sources may start on any element.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { ZERO = 0, RAW = 1, CODED = 2, UNSIGNED = 3 };
const u32 GROUP = 16;

template <int W> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef u64 type; };

// 16 elements of W bytes, zero behind the m-th.
template <int W> struct alignas(16) Group { typename Word<W>::type e[GROUP]; };

template <int W> __device__ void load(Group<W>& g, const u8* p, u32 m) {
  typedef typename Word<W>::type T;
  if (m == GROUP && ((u64)p & 15) == 0) {
#pragma unroll
    for (int i = 0; i < W; i++) ((uint4*)&g)[i] = ((const uint4*)p)[i];
  } else {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) g.e[i] = i < m ? ((const T*)p)[i] : T(0);
  }
}

template <int W> __device__ void store(u8* p, const Group<W>& g, u32 m) {
  typedef typename Word<W>::type T;
  if (m == GROUP && ((u64)p & 15) == 0) {
#pragma unroll
    for (int i = 0; i < W; i++) ((uint4*)p)[i] = ((const uint4*)&g)[i];
  } else {
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) if (i < m) ((T*)p)[i] = g.e[i];
  }
}

// link.py on the GPU: fp32 master weights to their difference from the 16-bit weights, and back.
__device__ u32 widened(u32 w, u32 half) {
  if (!half) return w << 16;
  u32 sign = (w & 0x8000) << 16, exponent = w >> 10 & 0x1f, mantissa = w & 0x3ff;
  if (exponent == 0) return sign | __float_as_uint((float)mantissa * 5.9604644775390625e-8f);  // 2^-24
  return sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
}

// The 16-bit weights of a tile's chunks: the address of each one's first, 0 where it has none; how many it has, zeros behind; and in
// the top bit of that, whether they are fp16.
struct Weights { const u64* first; const u32* count; };

template <int W> __device__ void link(Group<W>& g, Weights weights, u32 c, u32 base, u32 m) {}
template <> __device__ void link<4>(Group<4>& g, Weights weights, u32 c, u32 base, u32 m) {
  if (!weights.first[c]) return;
  u32 half = weights.count[c] >> 31, count = weights.count[c] & 0x7fffffff;
  Group<2> w;
  load<2>(w, (const u8*)weights.first[c] + (u64)base * 2, count > base ? min(m, count - base) : 0);
#pragma unroll
  for (u32 i = 0; i < GROUP; i++) {
    u32 z = g.e[i] - widened(w.e[i], half);
    z = z << 1 ^ (u32)((int)z >> 31);
    g.e[i] = i < m ? (z & 0x8000ffffu) | (z >> 16 & 0xff) << 23 | (z >> 24 & 0x7f) << 16 : 0;
  }
}

extern "C" __global__ void unlink(u32* data, const u16* weights, u64 count, u64 covered, u32 half) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u32 x = data[i], z = (x & 0x8000ffffu) | (x >> 23 & 0xff) << 16 | (x >> 16 & 0x7f) << 24;
  data[i] = (z >> 1 ^ (0 - (z & 1))) + (i < covered ? widened(weights[i], half) : 0);
}

template <int W> __device__ u32 top16(typename Word<W>::type v) { return (u32)(v >> (W * 8 - 16)) & 0xffff; }
template <> __device__ u32 top16<1>(u8 v) { return v; }

// Planes of one element. 8-bit floats: nibbles.
template <int W> __device__ u8 exponent_of(typename Word<W>::type v) { return (u8)(top16<W>(v) >> 7); }
template <> __device__ u8 exponent_of<1>(u8 v) { return v >> 3 & 0x0f; }
template <int W> __device__ u8 sign_mantissa_of(typename Word<W>::type v) {
  u32 t = top16<W>(v);
  return (u8)((t >> 8 & 0x80) | (t & 0x7f));
}
template <> __device__ u8 sign_mantissa_of<1>(u8 v) { return (v >> 4 & 0x08) | (v & 0x07); }

__device__ u8 pair(u8 first, u8 second) { return first | second << 4; }

// Or `values` over the block into `flags[0 .. 2]`, a stride apart.
__device__ void or_flags(u32 a, u32 b, u32 c, u32* flags, u32 stride) {
  __shared__ u32 sum[3];
  if (threadIdx.x < 3) sum[threadIdx.x] = 0;
  __syncthreads();
  for (int d = 16; d; d >>= 1) {
    a |= __shfl_xor_sync(0xffffffffu, a, d);
    b |= __shfl_xor_sync(0xffffffffu, b, d);
    c |= __shfl_xor_sync(0xffffffffu, c, d);
  }
  if (threadIdx.x % 32 == 0) {
    if (a) atomicOr(&sum[0], a);
    if (b) atomicOr(&sum[1], b);
    if (c) atomicOr(&sum[2], c);
  }
  __syncthreads();
  if (threadIdx.x < 3 && sum[threadIdx.x]) atomicOr(&flags[threadIdx.x * stride], sum[threadIdx.x]);
}

// Exponents of chunk c to slots + c * slot_stride (zero-filled to 16 bytes); flags[p][c] |= all bytes of plane p (its top halves).
template <int W> __device__ void split(const u64* src, const u32* elements, Weights weights, u8* slots, u64 slot_stride, u32* flags,
                                       u32 chunks) {
  u32 c = blockIdx.y, n = elements[c], base = (blockIdx.x * blockDim.x + threadIdx.x) * GROUP;
  u32 x_or = 0, h_or = 0, l_or = 0;
  if (base < n) {
    u32 m = min(GROUP, n - base);
    Group<W> g;
    load<W>(g, (const u8*)src[c] + (u64)base * W, m);
    link<W>(g, weights, c, base, m);
    alignas(16) u8 x[GROUP];
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
      u8 e = exponent_of<W>(g.e[i]);
      if (W == 1) { if (i % 2) x[i / 2] |= e << 4; else x[i / 2] = e; }
      else x[i] = e;
      x_or |= e;
      h_or |= sign_mantissa_of<W>(g.e[i]);
      if (W == 4) l_or |= (u32)g.e[i] & 0xffff;
      if (W == 8) l_or |= (u32)g.e[i] | (u32)((u64)g.e[i] >> 32 & 0xffff);
    }
    u8* slot = slots + (u64)c * slot_stride;
    if (W == 1) {
      *(u64*)(slot + base / 2) = *(u64*)x;
      if (base + GROUP >= n && base / GROUP % 2 == 0) *(u64*)(slot + base / 2 + 8) = 0;  // zero-filled to 16 bytes, as all slots
    }
    else *(uint4*)(slot + base) = *(uint4*)x;
  }
  or_flags(x_or, h_or, l_or, flags + c, chunks);
}

// Bytes that go through whole: the plane is the chunk.
extern "C" __global__ void split_whole(const u64* src, const u32* elements, const u64*, const u32*, u8* slots, u64 slot_stride,
                                       u32* flags, u32 chunks) {
  u32 c = blockIdx.y, n = elements[c], base = (blockIdx.x * blockDim.x + threadIdx.x) * GROUP, any = 0;
  if (base < n) {
    Group<1> g;
    load<1>(g, (const u8*)src[c] + base, min(GROUP, n - base));
    const u32* w = (const u32*)&g;
    any = w[0] | w[1] | w[2] | w[3];
    *(uint4*)(slots + (u64)c * slot_stride + base) = *(uint4*)&g;
  }
  or_flags(any, 0, 0, flags + c, chunks);
}

// Zero the last 16 bytes of every piece, so that what pack does not fill is padding of zeros.
extern "C" __global__ void clear_tails(u8* out, const u64* offsets, const u32* sizes, u32 pieces) {
  u32 p = blockIdx.x * blockDim.x + threadIdx.x;
  if (p < pieces && sizes[p]) *(uint4*)(out + offsets[p] + ((sizes[p] + 15) & ~15u) - 16) = make_uint4(0, 0, 0, 0);
}

// Copy `size` bytes with all the blocks of this chunk.
__device__ void copy_piece(u8* to, const u8* from, u32 size) {
  for (u32 at = (blockIdx.x * blockDim.x + threadIdx.x) * 16; at < size; at += gridDim.x * blockDim.x * 16) {
    if (at + 16 <= size) *(uint4*)(to + at) = *(const uint4*)(from + at);
    else for (u32 i = at; i < size; i++) to[i] = from[i];
  }
}

// All pieces of chunk c to their place in `out`. modes, offsets, sizes are [planes][chunks]; the first plane comes from the coded or
// the raw slots, the others again from the source.
template <int W> __device__ void pack(const u64* src, const u32* elements, Weights weights, const u8* raw, u64 raw_stride, const u8* coded,
                                      u64 coded_stride, const u8* modes, const u64* offsets, const u32* sizes, u8* out, u32 chunks) {
  u32 c = blockIdx.y, n = elements[c], base = (blockIdx.x * blockDim.x + threadIdx.x) * GROUP;
  if (modes[c] == CODED) copy_piece(out + offsets[c], coded + (u64)c * coded_stride, sizes[c]);
  if (modes[c] == RAW) copy_piece(out + offsets[c], raw + (u64)c * raw_stride, sizes[c]);
  if (base >= n) return;
  u8 h_mode = modes[chunks + c], l_mode = W > 2 ? modes[2 * chunks + c] : ZERO;
  if (h_mode == ZERO && l_mode == ZERO) return;
  u32 m = min(GROUP, n - base);
  Group<W> g;
  load<W>(g, (const u8*)src[c] + (u64)base * W, m);
  link<W>(g, weights, c, base, m);
  u8* to = out + offsets[chunks + c];
  if (h_mode == UNSIGNED) {
    const int bits = W == 1 ? 3 : 7;                  // a group of 16 is 2 * bits bytes
    u64 lo = 0, hi = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      lo |= (u64)sign_mantissa_of<W>(g.e[i]) << i * bits;
      hi |= (u64)sign_mantissa_of<W>(g.e[i + 8]) << i * bits;
    }
    to += base / 8 * bits;
    u32 bytes = (m * bits + 7) / 8;
    for (u32 i = 0; i < bytes; i++) to[i] = (u8)(i < bits ? lo >> 8 * i : hi >> 8 * (i - bits));
  } else if (h_mode == RAW) {
    if (W == 1) {
      for (u32 i = 0; i < (m + 1) / 2; i++) to[base / 2 + i] = pair(sign_mantissa_of<W>(g.e[2 * i]), sign_mantissa_of<W>(g.e[2 * i + 1]));
    } else {
      Group<1> h;
#pragma unroll
      for (u32 i = 0; i < GROUP; i++) h.e[i] = sign_mantissa_of<W>(g.e[i]);
      store<1>(to + base, h, m);
    }
  }
  if (W > 2 && l_mode == RAW) {
    to = out + offsets[2 * chunks + c] + (u64)base * (W - 2);
    if (W == 4) {
      Group<2> l;
#pragma unroll
      for (u32 i = 0; i < GROUP; i++) l.e[i] = (u16)g.e[i];
      store<2>(to, l, m);
    } else {
      for (u32 i = 0; i < m; i++)
        for (int k = 0; k < 3; k++) ((u16*)to)[3 * i + k] = (u16)((u64)g.e[i] >> 16 * k);
    }
  }
}

extern "C" __global__ void pack_whole(const u64* src, const u32* elements, const u64*, const u32*, const u8* raw, u64 raw_stride, const u8* coded,
                                      u64 coded_stride, const u8* modes, const u64* offsets, const u32* sizes, u8* out, u32 chunks) {
  u32 c = blockIdx.y;
  if (modes[c] == CODED) copy_piece(out + offsets[c], coded + (u64)c * coded_stride, sizes[c]);
  if (modes[c] == RAW) copy_piece(out + offsets[c], raw + (u64)c * raw_stride, sizes[c]);
}

// Chunk c of a payload to out + c * out_stride. `data` is where offsets count from; coded planes are in the slots, decoded.
template <int W> __device__ void merge(const u8* data, const u32* elements, const u8* slots, u64 slot_stride, const u8* modes,
                                       const u64* offsets, u8* out, u64 out_stride, u32 chunks) {
  u32 c = blockIdx.y, n = elements[c], base = (blockIdx.x * blockDim.x + threadIdx.x) * GROUP;
  if (base >= n) return;
  u32 m = min(GROUP, n - base);
  u8 x_mode = modes[c], h_mode = modes[chunks + c], l_mode = W > 2 ? modes[2 * chunks + c] : ZERO;
  Group<1> x = {}, h = {};
  const u8* from = x_mode == CODED ? slots + (u64)c * slot_stride : data + offsets[c];
  if (x_mode != ZERO) {
    if (W == 1) for (u32 i = 0; i < m; i++) x.e[i] = from[(base + i) / 2] >> i % 2 * 4 & 0x0f;
    else load<1>(x, from + base, m);
  }
  from = data + offsets[chunks + c];
  if (h_mode == RAW) {
    if (W == 1) for (u32 i = 0; i < m; i++) h.e[i] = from[(base + i) / 2] >> i % 2 * 4 & 0x0f;
    else load<1>(h, from + base, m);
  } else if (h_mode == UNSIGNED) {
    const int bits = W == 1 ? 3 : 7;
    from += base / 8 * bits;
    u32 bytes = (m * bits + 7) / 8;
    u64 lo = 0, hi = 0;
    for (u32 i = 0; i < bytes; i++) {
      if (i < bits) lo |= (u64)from[i] << 8 * i;
      else hi |= (u64)from[i] << 8 * (i - bits);
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      h.e[i] = lo >> i * bits & ((1 << bits) - 1);
      h.e[i + 8] = hi >> i * bits & ((1 << bits) - 1);
    }
  }
  Group<W> g = {};
  if (W > 2 && l_mode == RAW) {
    from = data + offsets[2 * chunks + c] + (u64)base * (W - 2);
    if (W == 4) {
      Group<2> l;
      load<2>(l, from, m);
#pragma unroll
      for (u32 i = 0; i < GROUP; i++) g.e[i] = l.e[i];
    } else {
      for (u32 i = 0; i < m; i++)
        for (int k = 0; k < 3; k++) g.e[i] |= (typename Word<W>::type)((u64)((const u16*)from)[3 * i + k] << 16 * k);
    }
  }
#pragma unroll
  for (u32 i = 0; i < GROUP; i++) {
    if (W == 1) g.e[i] = (x.e[i] << 3) | (h.e[i] & 0x08) << 4 | (h.e[i] & 0x07);
    else {
      u32 t = (u32)x.e[i] << 7 | (u32)(h.e[i] & 0x80) << 8 | (h.e[i] & 0x7f);
      g.e[i] |= (typename Word<W>::type)((u64)t << (W * 8 - 16));
    }
  }
  store<W>(out + (u64)c * out_stride + (u64)base * W, g, m);
}

extern "C" __global__ void merge_whole(const u8* data, const u32* elements, const u8* slots, u64 slot_stride, const u8* modes,
                                       const u64* offsets, u8* out, u64 out_stride, u32 chunks) {
  u32 c = blockIdx.y, n = elements[c], base = (blockIdx.x * blockDim.x + threadIdx.x) * GROUP;
  if (base >= n) return;
  Group<1> g = {};
  const u8* from = modes[c] == CODED ? slots + (u64)c * slot_stride : data + offsets[c];
  if (modes[c] != ZERO) load<1>(g, from + base, min(GROUP, n - base));
  store<1>(out + (u64)c * out_stride + base, g, min(GROUP, n - base));
}

#define INSTANTIATE(name, W)                                                                                                       \
  extern "C" __global__ void split_##name(const u64* src, const u32* elements, const u64* first, const u32* count, u8* slots,      \
                                          u64 slot_stride, u32* flags, u32 chunks) {                                               \
    split<W>(src, elements, Weights{first, count}, slots, slot_stride, flags, chunks);                                             \
  }                                                                                                                                \
  extern "C" __global__ void pack_##name(const u64* src, const u32* elements, const u64* first, const u32* count, const u8* raw,   \
                                         u64 raw_stride, const u8* coded, u64 coded_stride, const u8* modes, const u64* offsets,   \
                                         const u32* sizes, u8* out, u32 chunks) {                                                  \
    pack<W>(src, elements, Weights{first, count}, raw, raw_stride, coded, coded_stride, modes, offsets, sizes, out, chunks);       \
  }                                                                                                                                \
  extern "C" __global__ void merge_##name(const u8* data, const u32* elements, const u8* slots, u64 slot_stride, const u8* modes,  \
                                          const u64* offsets, u8* out, u64 out_stride, u32 chunks) {                               \
    merge<W>(data, elements, slots, slot_stride, modes, offsets, out, out_stride, chunks);                                         \
  }
INSTANTIATE(split8, 1)
INSTANTIATE(split16, 2)
INSTANTIATE(split32, 4)
INSTANTIATE(split64, 8)

// differ[c] = 1 where the first sizes[c] bytes of two slots are not the same.
extern "C" __global__ void compare(const u8* a, u64 a_stride, const u8* b, u64 b_stride, const u32* sizes, u32* differ) {
  u32 c = blockIdx.y, at = (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  bool other = false;
  for (u32 i = at; i < min(at + 16, sizes[c]); i++) other |= a[c * a_stride + i] != b[c * b_stride + i];
  if (other) differ[c] = 1;
}

extern "C" __global__ void publish(const u32* values, u32* host, u32 count) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) host[i] = values[i];
}

// CRC-32 (zlib's) of chunk c = data[offsets[c] .. offsets[c] + lengths[c]), a multiple of 16 bytes. One block a chunk.
//
// A CRC is the remainder of the message as a polynomial, so it can be summed from parts: thread t of T takes the words t, t + T, ...
// of the message, left-padded with zeros to a multiple of T words (leading zeros change nothing once the initial value is folded into
// the first word), steps by x^(32 T) with four table look-ups, and multiplies its sum by x^(32 (T - t)) at the end.
// `steps` is [4][256], `finals` [T]; both come from kernels.py. Bits are reflected, as everywhere in CRC-32.
__device__ u32 multiply(u32 a, u32 b) {  // a * b mod P, reflected
  u32 sum = 0;
  for (int i = 0; i < 32; i++) {
    sum ^= (a >> 31 - i & 1) ? b : 0;
    b = b >> 1 ^ (b & 1 ? 0xedb88320u : 0);
  }
  return sum;
}

extern "C" __global__ void checksum(const u8* data, const u64* offsets, const u64* lengths, const u32* steps, const u32* finals,
                                    u32* crc) {
  __shared__ u32 table[1024];
  __shared__ u32 sum;
  for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) table[i] = steps[i];
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  u32 c = blockIdx.x, T = blockDim.x, t = threadIdx.x;
  const u32* words = (const u32*)(data + offsets[c]);
  u64 count = lengths[c] / 4;
  u64 pad = (T - count % T) % T;
  u32 s = 0;
#pragma unroll 4
  for (u64 j = t; j < count + pad; j += T) {
    s = table[s & 255] ^ table[256 + (s >> 8 & 255)] ^ table[512 + (s >> 16 & 255)] ^ table[768 + (s >> 24)];
    if (j >= pad) s ^= words[j - pad] ^ (j == pad ? 0xffffffffu : 0u);
  }
  s = multiply(s, finals[t]);
  for (int d = 16; d; d >>= 1) s ^= __shfl_xor_sync(0xffffffffu, s, d);
  if (t % 32 == 0) atomicXor(&sum, s);
  __syncthreads();
  if (t == 0) crc[c] = count ? ~sum : 0;
}

// What nvCOMP 6's ANS decoder takes on trust from the head of a stream, and follows out of bounds where it is wrong (tried: any
// changed byte of it can fault the device). `bytes[c]` becomes the length that a sound head implies for the stream at
// data + offsets[c] of a chunk of raw_bytes[c], and 0 for any other. One thread a chunk.
//
//   u32 raw bytes | u32 block bytes | u8 least, u8 greatest symbol, u8 11, u8 0 | u32 2 | u32 coded bytes of each block
//   | i16 count of each symbol from least to greatest, in 2048ths; -1 stands for a rare symbol's 1 | to 16 bytes | blocks, each from 16 bytes
//
// As found in its output for chunks of 4 KiB to 1 MiB. The encoder stores a stream that looks otherwise uncoded, so this can refuse
// nothing that was written by us.
extern "C" __global__ void ans_stream_bytes(const u8* data, const u64* offsets, const u32* raw_bytes, const u32* limits, u32* bytes,
                                            u32 chunks) {
  u32 c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= chunks) return;
  bytes[c] = 0;
  const u8* stream = data + offsets[c];
  u32 limit = limits[c], raw = raw_bytes[c];
  if (limit < 32 || raw == 0) return;
  const u32* head = (const u32*)stream;
  u32 block = head[1], least = head[2] & 255, greatest = head[2] >> 8 & 255;
  if (head[0] != raw || block < 2048 || block & (block - 1) || block > 131072 || head[2] >> 16 != 11 || head[3] != 2 || least > greatest) return;
  u32 blocks = (raw + block - 1) / block, symbols = greatest - least + 1;
  u32 size = 16 + 4 * blocks + 2 * symbols;
  if (blocks > 8 || size > limit) return;
  const short* counts = (const short*)(stream + 16 + 4 * blocks);
  u32 sum = 0;
  for (u32 i = 0; i < symbols; i++) {
    if (counts[i] < -1 || counts[i] > 2048) return;
    sum += counts[i] < 0 ? 1 : counts[i];
  }
  if (sum != 2048) return;
  for (u32 i = 0; i < blocks; i++) {
    size = (size + 15) & ~15u;
    if (head[4 + i] < 128 || head[4 + i] & 1 || head[4 + i] > limit - size || size > limit) return;
    size += head[4 + i];
  }
  if (size <= limit) bytes[c] = size;
}
