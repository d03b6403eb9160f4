// Decoding attention over pages of 2-bit codes and dense windows; contract: oscar_kv/kernels/paged.py, bytes: pages.py.
//
// Three launches: `terms` (what the codes are multiplied by), `decode` (partial softmax of each split), `merge` (splits to output).
//
// How `decode` reads codes. Tokens (keys) and channels (values) are the rows of tensor-core tiles, heads of one KV head the
// columns, so that codes are the A operand and are made in registers where the instruction wants them: only bytes as stored go
// through shared memory. Which channel meets which lane is free in a sum over channels, so the byte order of the codec needs no
// shuffling: lanes take the channels that lie in their own bytes.
//
// Keys, 8-bit tiles (m16n8k32): a mask takes four codes out of a word, as they lie (times 4 in half of the cases). The query has
// 15 bits, in two columns: heads 4k .. 4k + 3 fill the 8 columns of tile k, and a lane finds both parts of its head's logit.
//
// Values, float16 tiles (m16n8k16): a 16-bit half holds 8 codes. Masked out in place, code i is the float16 subnormal
// code * 4^i * 2^-24 (i <= 4; the last three after one shift): exact, without an offset to subtract, one instruction for two codes.
// The powers of four come off the sums at the end.
//
// Compile-time: D, G, PAGE, KEXTRA, VEXTRA (a second number per row), BF16 (else float16), SOFTCAP.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int WARPS = D == 256 ? 2 : 4;
constexpr int KT = (G + 3) / 4;      // column tiles of keys, 4 heads in two parts
constexpr int NT = (G + 7) / 8;      // column tiles of values, 8 heads: head 8n + 4c + t is column 2t + c of tile n
constexpr int COLS = G <= 4 ? 1 : 2; // columns of a lane that hold heads
constexpr int KW = D / 64;           // 32-bit words of codes per lane, keys
constexpr int HALVES = D / 64;       // 16-bit halves of codes per lane, values
constexpr int TILES = D / 16;        // row tiles of the output
constexpr int STEPS = D / 32;        // contraction steps over channels
constexpr int CODES = D / 4;         // bytes
constexpr int KNUM = KEXTRA ? 4 : 2;
constexpr int VNUM = VEXTRA ? 4 : 2;
constexpr int OFF_KN = PAGE * CODES;
constexpr int OFF_VC = OFF_KN + PAGE * KNUM;
constexpr int OFF_VN = OFF_VC + PAGE * CODES;
constexpr int HEAD_BYTES = OFF_VN + PAGE * VNUM;
constexpr int TOKENS = 32;           // of a tile: what a warp reads at once, never across pages
constexpr int TILE_BYTES = TOKENS * (2 * CODES + KNUM + VNUM);
constexpr int AT_KN = TOKENS * CODES, AT_VC = AT_KN + TOKENS * KNUM, AT_VN = AT_VC + TOKENS * CODES;  // in a tile
#ifndef BLOCKS
#define BLOCKS (NT > 1 ? (D == 64 ? 4 : 2) : D == 256 ? 6 : 4)  // per multiprocessor: more would spill registers
#endif
constexpr int STAGES = 4;            // tiles in flight or in use, per warp
constexpr int SUMS = WARPS * G * (D + 4) * 4;
constexpr int BUFFER = WARPS * STAGES * TILE_BYTES > SUMS ? WARPS * STAGES * TILE_BYTES : SUMS;
constexpr float NEVER = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float HEADROOM = 6.0f;     // the largest weight is 2^6 when the maximum is taken anew ...
constexpr float LIMIT = 14.0f;       // ... which happens when one would pass 2^14

__device__ __forceinline__ float from_half(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ u16 to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
__device__ __forceinline__ float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float rcp_(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack_half(float lo, float hi) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ u32 pack_model(float lo, float hi) {
#if BF16
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
#else
  return pack_half(lo, hi);
#endif
}
__device__ __forceinline__ float from_model(u16 x) {
#if BF16
  return __uint_as_float((u32)x << 16);
#else
  return from_half(x);
#endif
}
__device__ __forceinline__ u16 to_model(float f) {
#if BF16
  u16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
#else
  return to_half(f);
#endif
}
__device__ __forceinline__ u32 transposed(u32 x) {  // an 8 x 8 tile of 16-bit numbers, two to a lane
  u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y;
}
__device__ __forceinline__ void mma_codes(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_keys(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_model(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma_codes(c, a0, a1, a2, a3, b0, b1);
#endif
}
// Codes i of both halves of w, as float16 subnormals; w10 = w >> 10.
__device__ __forceinline__ u32 code_pair(u32 w, u32 w10, int i) {
  return i < 5 ? w & (0x00030003u << (2 * i)) : w10 & (0x00030003u << (2 * (i - 5)));
}
__device__ __forceinline__ constexpr int power(int i) { return i < 5 ? i : i - 5; }

// Of launches that follow each other: the next may begin, and this one needs the last one's results now.
__device__ __forceinline__ void next_may_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void need_last() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void copy16(u32 shared, const u8* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(global));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
// Which token of 8 a row of a tensor-core tile stands for: so chosen that lanes meet no shared-memory bank twice.
__device__ __forceinline__ constexpr int token_of(int row) { return row ^ (row >> 2 & 1); }
// The numbers of a row: scale, and the second one in the upper half where there is one.
template <int BYTES> __device__ __forceinline__ u32 numbers(const u8* p) {
  return BYTES == 4 ? *(const u32*)p : *(const u16*)p;
}

struct Softmax {          // of the columns that a lane sees
  float top[NT][COLS];    // log2 of what weights are relative to
  float total[NT][COLS];  // sum of weights, this lane's rows
  float extra[NT][COLS];  // sum of weights times the value rows' second number
};

__device__ __forceinline__ void start(Softmax& s, float (&o)[NT][TILES][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
#pragma unroll
    for (int c = 0; c < COLS; c++) s.top[n][c] = s.total[n][c] = s.extra[n][c] = 0.f;
#pragma unroll
    for (int i = 0; i < TILES; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.f;
  }
}
// Exponents `e`, N rows of a column in each lane, relative to top: raise top if any passes LIMIT. Rare but for the first tokens,
// which set it; the warp agrees.
// `f`: terms of logits whose offsets hold -top already, or null.
template <int N>
__device__ __forceinline__ void raise(Softmax& s, float (&o)[NT][TILES][4], float (&e)[NT][COLS][N], float4 (*f)[COLS], bool first) {
  float high = NEVER;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < COLS; c++)
#pragma unroll
      for (int r = 0; r < N; r++) high = fmaxf(high, e[n][c][r]);
  if (!first && !__any_sync(0xffffffffu, high > LIMIT)) return;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      float most = first ? NEVER : 0.f;  // top stays where nothing is above it
#pragma unroll
      for (int r = 0; r < N; r++) most = fmaxf(most, e[n][c][r] - HEADROOM);
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
      const float keep = exp2_(-most);
      s.top[n][c] += most;
      if (f) f[n][c].w -= most;
      s.total[n][c] *= keep;
      s.extra[n][c] *= keep;
#pragma unroll
      for (int r = 0; r < N; r++) e[n][c][r] -= most;
#pragma unroll
      for (int i = 0; i < TILES; i++) { o[n][i][c] *= keep; o[n][i][c + 2] *= keep; }
    }
}

// -- what codes are multiplied by --------------------------------------------------------------------------------------

constexpr int FOLD = 4;  // threads that share a column of a matrix
constexpr int CHUNK = 4;                // heads that meet in shared memory at once
constexpr int CHUNKS = (G + CHUNK - 1) / CHUNK;

// Sums over the threads (s, 0 .. FOLD - 1): of head CHUNK i + fold in x[i] of thread (s, fold), fold < CHUNK; N sums at once.
template <int N> __device__ __forceinline__ void meet(float (&x)[N][CHUNKS], const float (&y)[N][G], float (*room)[CHUNK][D]) {
  const int s = threadIdx.x % D, fold = threadIdx.x / D;
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int g = 0; g < CHUNK; g++)
        if (CHUNK * i + g < G) room[n * FOLD + fold][g][s] = y[n][CHUNK * i + g];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
      x[n][i] = 0.f;
      if (fold < CHUNK && CHUNK * i + fold < G)
#pragma unroll
        for (int f = 0; f < FOLD; f++) x[n][i] += room[n * FOLD + f][fold][s];
    }
    if (i + 1 < CHUNKS) __syncthreads();
  }
}

constexpr int ROOM = (G > 8 ? 1 : 2) * FOLD;
__device__ __forceinline__ void meet_both(float (&x)[2][CHUNKS], const float (&y)[2][G], float (*room)[CHUNK][D]) {
  if (G <= 8) {
    meet<2>(x, y, room);
  } else {
    meet<1>((float(&)[1][CHUNKS])x[0], (const float(&)[1][G])y[0], room);
    __syncthreads();
    meet<1>((float(&)[1][CHUNKS])x[1], (const float(&)[1][G])y[1], room);
  }
}

// sum_d in[g][d] m[d][s], each thread its part of the rows d: in two steps, so that the matrix can be on its way early.
constexpr int ROWS = D / FOLD, EARLY = D == 256 ? 8 : 16;
__device__ __forceinline__ void begin(float (&w)[EARLY], const float* m) {
  const int s = threadIdx.x % D, fold = threadIdx.x / D;
#pragma unroll
  for (int i = 0; i < EARLY; i++) w[i] = m[(fold * ROWS + i) * D + s];
}
template <int N>
__device__ __forceinline__ void multiply(float (&y)[N][G], const float (*in)[D], const float (&early)[N][EARLY],
                                         const float* const (&m)[N]) {
  const int s = threadIdx.x % D, fold = threadIdx.x / D;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int g = 0; g < G; g++) y[n][g] = 0.f;
#pragma unroll
  for (int i = 0; i < EARLY; i++)
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
      for (int n = 0; n < N; n++) y[n][g] += in[g][fold * ROWS + i] * early[n][i];
#pragma unroll 8
  for (int i = EARLY; i < ROWS; i++) {
    float w[N];
#pragma unroll
    for (int n = 0; n < N; n++) w[n] = m[n][(fold * ROWS + i) * D + s];
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
      for (int n = 0; n < N; n++) y[n][g] += in[g][fold * ROWS + i] * w[n];
  }
}

// One block per (row, KV head), FOLD x D threads. slots: int8 [B, Hkv, 4 KT, 2, D], high and low part of 15 bits relative to the
// largest; sums: float4 [B, Hkv, 4 KT]: a logit is scale * (x * sum + y) + extra * z + w, in log2 units (natural ones with a cap).
extern "C" __global__ void __launch_bounds__(FOLD * D, 1)
terms(const u16* __restrict__ query, const float* __restrict__ query_slots, const float* __restrict__ query_sums,
      const float* __restrict__ query_noise, signed char* __restrict__ slots, float4* __restrict__ sums, int heads, float scaling,
      float bonus_limit) {
  __shared__ float q[G][D];
  __shared__ float room[ROOM][CHUNK][D];
  __shared__ float part[G][D / 32][5];
  const int bh = blockIdx.x, h = bh % heads, s = threadIdx.x % D, fold = threadIdx.x / D, lane = s % 32, warp = s / 32;
  next_may_begin();
  // Without a noise matrix the slots stand in for it: no branch, and no bonus.
  const float* const m[2] = {query_slots + (size_t)h * D * D, (query_noise ? query_noise : query_slots) + (size_t)h * D * D};
  float early[2][EARLY];
  begin(early[0], m[0]);
  begin(early[1], m[1]);
  for (int i = threadIdx.x; i < G * D; i += FOLD * D) q[i / D][i % D] = from_model(query[(size_t)bh * G * D + i]);
  const float taken = s % 2 ? 0.25f : 1.f;  // codes at odd places are read times 4
  const float* c = query_sums + ((size_t)h * D + s) * 3;
  const float c0 = c[0], c1 = c[1], c2 = c[2];
  __syncthreads();
  float y[2][G], x[2][CHUNKS];  // slots, and what the noise is the square of
  multiply<2>(y, q, early, m);
  meet_both(x, y, room);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int g = CHUNK * i + fold;
    if (fold >= CHUNK || g >= G) continue;
    float r[5] = {fabsf(x[0][i]) * taken, x[1][i] * x[1][i], q[g][s] * c0, q[g][s] * c1, q[g][s] * c2};
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      r[0] = fmaxf(r[0], __shfl_xor_sync(0xffffffffu, r[0], mask));
#pragma unroll
      for (int k = 1; k < 5; k++) r[k] += __shfl_xor_sync(0xffffffffu, r[k], mask);
    }
    if (lane == 0)
#pragma unroll
      for (int k = 0; k < 5; k++) part[g][warp][k] = r[k];
  }
  __syncthreads();
  const int position = s / 16 * 16 + s % 4 * 4 + s % 16 / 4;  // codes of one bit position of a word lie together
#pragma unroll
  for (int i = 0; i < KT; i++) {
    const int g = CHUNK * i + fold;
    if (fold >= CHUNK) break;
    const size_t at = (size_t)bh * 4 * KT + g;
    if (g >= G) {
      slots[(at * 2) * D + position] = slots[(at * 2 + 1) * D + position] = 0;
      if (s == 0) sums[at] = make_float4(0.f, 0.f, 0.f, 0.f);
      continue;
    }
    float r[5] = {0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < D / 32; w++) {
      r[0] = fmaxf(r[0], part[g][w][0]);
#pragma unroll
      for (int k = 1; k < 5; k++) r[k] += part[g][w][k];
    }
    const float unit = fmaxf(r[0], 1e-30f) / 32512.f;
    const int value = __float2int_rn(x[0][i] / unit * taken), high = (value + 128) >> 8;
    slots[(at * 2) * D + position] = high;
    slots[(at * 2 + 1) * D + position] = value - 256 * high;
    if (s == 0) {
      const float bonus = query_noise ? fminf(0.5f * scaling * scaling * r[1], bonus_limit) : 0.f;
      const float f = SOFTCAP ? 1.f : LOG2E;
      sums[at] = make_float4(scaling * f * unit, scaling * f * r[2], scaling * f * r[3], f * (scaling * r[4] + bonus));
    }
  }
}

// -- partial softmax ---------------------------------------------------------------------------------------------------

struct Dense {  // strides in elements
  const u16* key; long long key_page, key_row, key_head;
  const u16* value; long long value_page, value_row, value_head;
  const int* table; int table_stride, page;
};

// The splits of one (row, head) after another: float [B, Hkv, splits, G, D], and float4 [B, Hkv, splits, G] with log2 of the unit,
// the sum of weights and the sum of weights times the second number.
__device__ __forceinline__ constexpr int spread(int channel) {  // so that lanes meet no bank twice
  return channel ^ (channel / (D / 8) >> 1);
}
__device__ __forceinline__ void finish(Softmax& s, float (&o)[NT][TILES][4], bool packed, bool any, float* room, float* out,
                                       float4* stats) {
  __shared__ float tops[WARPS][8 * NT];
  __shared__ float totals[WARPS][8 * NT][2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      float a = s.total[n][c], b = s.extra[n][c];
#pragma unroll
      for (int mask = 4; mask < 32; mask <<= 1) {
        a += __shfl_xor_sync(0xffffffffu, a, mask);
        b += __shfl_xor_sync(0xffffffffu, b, mask);
      }
      if (g == 0) {
        const int head = 8 * n + 4 * c + t;
        tops[warp][head] = any ? s.top[n][c] : NEVER;
        totals[warp][head][0] = a;
        totals[warp][head][1] = b;
      }
    }
  __syncthreads();  // and the room was in use
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      const int head = 8 * n + 4 * c + t;
      if (head >= G) continue;
      float top = NEVER;
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][head]);
      const float keep = exp2_(tops[warp][head] - top);
      float* row = room + (warp * G + head) * (D + 4);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        if (packed) {
          const int first = (g * HALVES + i / 4) * 8 + i % 4;
          row[spread(first)] = o[n][i][c] * keep * exp2f(24.f - 2.f * power(i % 4));
          row[spread(first + 4)] = o[n][i][c + 2] * keep * exp2f(24.f - 2.f * power(i % 4 + 4));
        } else {
          const int first = g * (D / 8) + 2 * i;
          row[spread(first)] = o[n][i][c] * keep;
          row[spread(first + 1)] = o[n][i][c + 2] * keep;
        }
      }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += 32 * WARPS) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) x += room[(w * G + i / D) * (D + 4) + spread(i % D)];
    out[i] = x;
  }
  if (threadIdx.x < G) {
    const int head = threadIdx.x;
    float top = NEVER, a = 0.f, b = 0.f;
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][head]);
    for (int w = 0; w < WARPS; w++) {
      const float keep = exp2_(tops[w][head] - top);
      a += totals[w][head][0] * keep;
      b += totals[w][head][1] * keep;
    }
    stats[head] = make_float4(top, a, b, 0.f);
  }
}

__device__ __forceinline__ float capped(float x, float cap) {
#if SOFTCAP
  float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x / cap));
  return cap * y * LOG2E;
#else
  return x;
#endif
}

// Tokens that are read dense: block `part` of `parts` takes every parts-th group of 16 x WARPS tokens.
__device__ __forceinline__ void dense_part(const Dense& dense, const u16* query, int b, int h, int length, int sink, int first,
                                           int part, int parts, float factor, float cap, float* room, float* out,
                                           float4* stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int sinks = min(sink, length), count = sinks + max(0, length - first);
  Softmax s;
  float o[NT][TILES][4];
  start(s, o);
  u32 q[NT][D / 32][4];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int u = 0; u < D / 32; u++) {
      uint4 x = make_uint4(0, 0, 0, 0);
      const int head = 8 * n + 4 * (g & 1) + (g >> 1);
      if (head < G) x = *(const uint4*)(query + (size_t)head * D + 32 * u + 8 * t);
      q[n][u][0] = x.x; q[n][u][1] = x.y; q[n][u][2] = x.z; q[n][u][3] = x.w;
    }
  const int* table = dense.table + (size_t)b * dense.table_stride;
  bool any = false;
  for (int i = (part * WARPS + warp) * 16; i < count; i += parts * WARPS * 16) {
    auto at = [&](int j, long long page_stride, long long row_stride) -> long long {
      j = min(j, count - 1);
      const int position = j < sinks ? j : first + j - sinks;
      return table[position / dense.page] * page_stride + position % dense.page * row_stride;
    };
    const u16* k0 = dense.key + at(i + g, dense.key_page, dense.key_row) + h * dense.key_head + 8 * t;
    const u16* k1 = dense.key + at(i + g + 8, dense.key_page, dense.key_row) + h * dense.key_head + 8 * t;
    float c[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
    for (int u = 0; u < D / 32; u++) {
      const uint4 x = *(const uint4*)(k0 + 32 * u), y = *(const uint4*)(k1 + 32 * u);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        mma_model(c[n], x.x, y.x, x.y, y.y, q[n][u][0], q[n][u][1]);
        mma_model(c[n], x.z, y.z, x.w, y.w, q[n][u][2], q[n][u][3]);
      }
    }
    float e[NT][COLS][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int col = 0; col < COLS; col++) {
        e[n][col][0] = i + g < count ? capped(c[n][col] * factor, cap) - s.top[n][col] : NEVER;
        e[n][col][1] = i + g + 8 < count ? capped(c[n][col + 2] * factor, cap) - s.top[n][col] : NEVER;
      }
    raise<2>(s, o, e, nullptr, !any);
    any = true;
    u32 p[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float x[2] = {0.f, 0.f};
#pragma unroll
        for (int col = 0; col < COLS; col++) {
          x[col] = exp2_(e[n][col][r]);
          s.total[n][col] += x[col];
        }
        p[n][r] = transposed(pack_model(x[0], x[1]));
      }
    }
    const u16* v[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
      v[r] = dense.value + at(i + 2 * t + (r & 1) + 8 * (r >> 1), dense.value_page, dense.value_row) + h * dense.value_head +
             g * (D / 8);
#pragma unroll
    for (int u = 0; u < D / 64; u++) {  // 8 channels of four tokens at a time
      u32 x[4][4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint4 y = *(const uint4*)(v[r] + 8 * u);
        x[r][0] = y.x; x[r][1] = y.y; x[r][2] = y.z; x[r][3] = y.w;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 a0 = __byte_perm(x[0][j], x[1][j], 0x5410), a1 = __byte_perm(x[0][j], x[1][j], 0x7632);
        const u32 a2 = __byte_perm(x[2][j], x[3][j], 0x5410), a3 = __byte_perm(x[2][j], x[3][j], 0x7632);
#pragma unroll
        for (int n = 0; n < NT; n++) mma_model(o[n][4 * u + j], a0, a1, a2, a3, p[n][0], p[n][1]);
      }
    }
  }
  next_may_begin();
  finish(s, o, false, any, room, out, stats);
}

// grid (dense_parts + splits, B * Hkv), 128 threads.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
decode(const u8* __restrict__ pages, long long page_stride, const int* __restrict__ table, int table_stride,
       const u16* __restrict__ dense_key, long long key_page, long long key_row, long long key_head,
       const u16* __restrict__ dense_value, long long value_page, long long value_row, long long value_head,
       const int* __restrict__ dense_table, int dense_stride, int dense_page, const int* __restrict__ lengths,
       const u16* __restrict__ query, const u32* __restrict__ slots, const float4* __restrict__ sums,
       float* __restrict__ out, float4* __restrict__ stats, int heads, int sink, int recent, int dense_parts, float factor,
       float cap) {
  __shared__ __align__(16) u8 buffer[BUFFER];
  const int bh = blockIdx.y, b = bh / heads, h = bh % heads, total = gridDim.x;
  const int length = lengths[b], first = max(sink, length - recent);  // codes are read in [sink, first)
  out += ((size_t)bh * total + blockIdx.x) * G * D;
  stats += ((size_t)bh * total + blockIdx.x) * G;
  if ((int)blockIdx.x < dense_parts) {
    const Dense dense = {dense_key, key_page, key_row, key_head, dense_value, value_page, value_row, value_head,
                         dense_table, dense_stride, dense_page};
    dense_part(dense, query + (size_t)bh * G * D, b, h, length, sink, first, blockIdx.x, dense_parts, factor, cap,
               (float*)buffer, out, stats);
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Softmax s;
  float o[NT][TILES][4];
  start(s, o);
  const int splits = total - dense_parts, begin = sink / TOKENS, end = first > sink ? (first + TOKENS - 1) / TOKENS : begin;
  const int per = (end - begin + splits - 1) / splits, lo = begin + ((int)blockIdx.x - dense_parts) * per, hi = min(end, lo + per);

  const int* row = table + (size_t)b * table_stride;
  const u8* base = pages + (size_t)h * HEAD_BYTES;
  const u8* own = buffer + warp * STAGES * TILE_BYTES;
  __shared__ uint4 shared_scales[WARPS][TOKENS];
  uint4* scales = shared_scales[warp];
  const u32 own_address = (u32)__cvta_generic_to_shared(own);
  // The lane's share of the numbers: 16 bytes of keys or of values.
  const bool of_keys = lane < 16, has_numbers = lane % 16 < TOKENS / 16 * (of_keys ? KNUM : VNUM);
  const int numbers_from = (of_keys ? OFF_KN : OFF_VN) + lane % 16 * 16, numbers_to = (of_keys ? AT_KN : AT_VN) + lane % 16 * 16;
  auto fetch = [&](int stage, int tile, int page) {
    const int token = tile * TOKENS % PAGE;
    const u8* from = base + page * page_stride;
    const u32 to = own_address + stage * TILE_BYTES;
#pragma unroll
    for (int i = 0; i < CODES / 16; i++) {
      const int at = (32 * i + lane) * 16;
      copy16(to + at, from + token * CODES + at);
      copy16(to + AT_VC + at, from + OFF_VC + token * CODES + at);
    }
    if (has_numbers) copy16(to + numbers_to, from + numbers_from + token * (of_keys ? KNUM : VNUM));
  };

  int ahead = lo + warp, page = ahead < hi ? row[ahead * TOKENS / PAGE] : 0;  // the next tile to fetch, and its page
  auto fetch_next = [&](int stage) {
    if (ahead < hi) fetch(stage, ahead, page);
    commit();
    ahead += WARPS;
    if (ahead < hi) page = row[ahead * TOKENS / PAGE];
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch_next(i);
  need_last();
  u32 q[KT][STEPS][2];
  float4 f[NT][COLS];
#pragma unroll
  for (int k = 0; k < KT; k++)
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) q[k][i / 2][i % 2] = slots[((size_t)bh * 8 * KT + 8 * k + g) * (D / 4) + t * (D / 16) + i];
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int col = 0; col < COLS; col++)
      f[n][col] = 2 * n + col < KT ? sums[(size_t)bh * 4 * KT + 8 * n + 4 * col + t] : make_float4(0.f, 0.f, 0.f, 0.f);

  const int rank = token_of(g);  // of the token that this lane sees in row g
  int c[2][KT][4];  // logits of 32 tokens, before their scales
  auto logits = [&](const u8* at, int tile) {
    {  // the numbers of one token a lane; of tokens that are read dense, or not there, such that they weigh nothing
      const u32 kn = numbers<KNUM>(at + AT_KN + lane * KNUM), vn = numbers<VNUM>(at + AT_VN + lane * VNUM);
      const int position = tile * TOKENS + lane;
      const bool live = position >= sink && position < first;
      const float vs = from_half((u16)vn), ve = VEXTRA ? from_half((u16)(vn >> 16)) : 0.f, inv = rcp_(vs);
      scales[lane] = live ? make_uint4(kn, __float_as_uint(log2_(vs)), __float_as_uint(inv), __float_as_uint(inv * ve))
                          : make_uint4(0, __float_as_uint(NEVER), 0, 0);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int k = 0; k < KT; k++) c[j][k][0] = c[j][k][1] = c[j][k][2] = c[j][k][3] = 0;
      u32 x[KW], y[KW];
      const u8* codes = at + (16 * j + rank) * CODES + t * (D / 16);
#pragma unroll
      for (int w = 0; w < KW; w++) x[w] = ((const u32*)codes)[w], y[w] = ((const u32*)(codes + 8 * CODES))[w];
#pragma unroll
      for (int w = 0; w < KW; w++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 a = i ? x[w] >> 4 : x[w], b = i ? y[w] >> 4 : y[w];
#pragma unroll
          for (int k = 0; k < KT; k++)
            mma_keys(c[j][k], a & 0x03030303u, b & 0x03030303u, a & 0x0c0c0c0cu, b & 0x0c0c0c0cu, q[k][2 * w + i][0],
                     q[k][2 * w + i][1]);
        }
    }
  };
  // The logits of the next tile are summed beside the outputs of this one, so that each hides the other's latency.
  int stage = 0;
  if (lo + warp < hi) {
    wait<STAGES - 2>();
    __syncwarp();
    logits(own, lo + warp);
  }
  for (int tile = lo + warp; tile < hi; tile += WARPS) {
    __syncwarp();
    const u8* at = own + stage * TILE_BYTES;
    // exponents of what values are multiplied by: logit and value scale together, so that float16 holds the product
    float e[NT][COLS][4], inverse[4], second[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint4 token = scales[8 * r + rank];
      const float ks = from_half((u16)token.x), ke = KEXTRA ? from_half((u16)(token.x >> 16)) : 0.f;
      const float size = __uint_as_float(token.y);
      inverse[r] = __uint_as_float(token.z);
      second[r] = __uint_as_float(token.w);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int col = 0; col < COLS; col++) {
          const float4 k = f[n][col];
          const int tile_of = 2 * n + col < KT ? 2 * n + col : 0;
          const int dot = c[r / 2][tile_of][2 * (r % 2)] * 256 + c[r / 2][tile_of][2 * (r % 2) + 1];
          const float x = ks * ((float)dot * k.x + k.y) + (KEXTRA ? ke * k.z + k.w : k.w);
          e[n][col][r] = SOFTCAP ? capped(x, cap) + (size - s.top[n][col]) : x + size;
        }
    }
    raise<4>(s, o, e, SOFTCAP ? nullptr : f, tile == lo + warp);
    u32 p[2][NT][2];
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float x[2] = {0.f, 0.f};
#pragma unroll
        for (int col = 0; col < COLS; col++) {
          x[col] = exp2_(e[n][col][r]);
          s.total[n][col] += x[col] * inverse[r];
          if (VEXTRA) s.extra[n][col] += x[col] * second[r];
        }
        p[r / 2][n][r % 2] = transposed(pack_half(x[0], x[1]));
      }
    wait<STAGES - 3>();
    __syncwarp();
    fetch_next(stage == 0 ? STAGES - 1 : stage - 1);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    logits(own + stage * TILE_BYTES, tile + WARPS);  // of nothing after the last
    // outputs: channels x heads
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u8* codes = at + AT_VC + 16 * j * CODES + g * (D / 32);
      u32 v[4][(HALVES + 1) / 2];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const u8* token = codes + (8 * (r >> 1) + token_of(2 * t + (r & 1))) * CODES;
#pragma unroll
        for (int w = 0; w < (HALVES + 1) / 2; w++) v[r][w] = HALVES == 1 ? *(const u16*)token : ((const u32*)token)[w];
      }
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const u32 pick = half & 1 ? 0x7632 : 0x5410;
        const u32 x = __byte_perm(v[0][half / 2], v[1][half / 2], pick), x10 = x >> 10;
        const u32 y = __byte_perm(v[2][half / 2], v[3][half / 2], pick), y10 = y >> 10;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 a0 = code_pair(x, x10, i), a1 = code_pair(x, x10, i + 4), a2 = code_pair(y, y10, i), a3 = code_pair(y, y10, i + 4);
#pragma unroll
          for (int n = 0; n < NT; n++) mma_codes(o[n][4 * half + i], a0, a1, a2, a3, p[j][n][0], p[j][n][1]);
        }
      }
    }
  }
  wait<0>();
  next_may_begin();
  finish(s, o, true, lo + warp < hi, (float*)buffer, out, stats);
}

// -- splits to output --------------------------------------------------------------------------------------------------

constexpr int MOST = 160;  // splits

// One block per (row, KV head), FOLD x D threads.
extern "C" __global__ void __launch_bounds__(FOLD * D, 1)
merge(const float* __restrict__ parts, const float4* __restrict__ stats, const float* __restrict__ value_slots,
      const float* __restrict__ value_sums, const float* __restrict__ sink_logits, u16* __restrict__ out, float* __restrict__ lse,
      int heads, int total, int dense_parts) {
  __shared__ float packed[G][D];
  __shared__ float room[ROOM][CHUNK][D];
  __shared__ float keep[G][MOST];
  __shared__ float sums[G][3];  // all weights, those of codes, those times the second number
  const int bh = blockIdx.x, h = bh % heads, s = threadIdx.x % D, fold = threadIdx.x / D, lane = threadIdx.x % 32;
  parts += (size_t)bh * total * G * D;
  stats += (size_t)bh * total * G;
  const float* matrix = value_slots + (size_t)h * D * D;
  const float* const matrices[1] = {matrix};
  float early[1][EARLY];
  begin(early[0], matrix);
  const float* v = value_sums + (size_t)h * 3 * D + s;
  const float direct = v[D], mean = v[2 * D];
  need_last();
  for (int g = threadIdx.x / 32; g < G; g += FOLD * D / 32) {
    const float extra = sink_logits ? sink_logits[h * G + g] * LOG2E : NEVER;
    float4 a[MOST / 32];
    float top = extra, sum = 0.f, mass = 0.f, second = 0.f;
#pragma unroll
    for (int k = 0; k < MOST / 32; k++) {
      const int i = 32 * k + lane;
      a[k] = i < total ? stats[i * G + g] : make_float4(NEVER, 0.f, 0.f, 0.f);
      top = fmaxf(top, a[k].x);
    }
    for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
#pragma unroll
    for (int k = 0; k < MOST / 32; k++) {
      const int i = 32 * k + lane;
      const float w = exp2_(a[k].x - top);
      keep[g][i] = w;
      sum += w * a[k].y;
      if (i >= dense_parts) mass += w * a[k].y, second += w * a[k].z;
    }
    for (int mask = 16; mask; mask >>= 1) {
      sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      mass += __shfl_xor_sync(0xffffffffu, mass, mask);
      second += __shfl_xor_sync(0xffffffffu, second, mask);
    }
    if (lane == 0) {
      if (sink_logits) sum += exp2_(extra - top);
      sums[g][0] = sum; sums[g][1] = mass; sums[g][2] = second;
      if (lse) lse[bh * G + g] = sum > 0.f ? (top + log2f(sum)) / LOG2E : __int_as_float(0xff800000);
    }
  }
  __syncthreads();
  float y[2][G], x[2][CHUNKS];  // read dense, read from codes
#pragma unroll
  for (int g = 0; g < G; g++) y[0][g] = y[1][g] = 0.f;
#pragma unroll 4
  for (int i = fold; i < total; i += FOLD)
#pragma unroll
    for (int g = 0; g < G; g++) {
      const float w = keep[g][i] * parts[(size_t)(i * G + g) * D + s];
      if (i < dense_parts) y[0][g] += w; else y[1][g] += w;
    }
  meet_both(x, y, room);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (fold < CHUNK && CHUNK * i + fold < G) packed[CHUNK * i + fold][s] = x[1][i];
  __syncthreads();
  float z[1][G], turned[1][CHUNKS];
  multiply<1>(z, packed, early, matrices);
  meet<1>(turned, z, room);
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int g = CHUNK * i + fold;
    if (fold >= CHUNK || g >= G) continue;
    const float value = x[0][i] + turned[0][i] + sums[g][2] * direct + sums[g][1] * mean;
    out[(size_t)(bh * G + g) * D + s] = to_model(sums[g][0] > 0.f ? value / sums[g][0] : 0.f);
  }
}
