// The DiT over the rows of one request: products, the attention between them, what is between sampler steps.
//
// A product takes up to 80 rows. Its weights are the first factor of the matrix instruction (64 outputs), the
// rows the second (80 columns). A cluster of thread blocks shares the depth: each block has all outputs of
// the cluster over its part of the depth, then takes its share of the rows from all of them, added in order.
// Weights are asked for before the kernel waits for the one before it, so they come while that one ends.
// dit_rows.py defines the tiles, launches the kernels and fills their structs.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int MAX_ROWS = 80;  // ten groups of eight: what one matrix instruction takes
constexpr int SLICE = 64;     // depth of a slice: 128 bytes a row, the width of the swizzle
constexpr int ROWS_SLICE = MAX_ROWS * SLICE * 2;

struct Product {
  const u16* x;          // (M, K) bf16
  const float* squares;  // (M, parts) of x, when a norm comes before
  const u16* weight;     // (N, K)
  const u16* bias;       // (N)
  const u16* residual;   // (M, N)
  const u16* norm;       // (N) weight of the norm that comes next
  u16* out;              // (M, N)
  u16* scaled;           // (M, N) out times norm
  float* squares_out;    // (M, N / BN)
  int rows;
  int parts;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ float wide(u32 half) { return __uint_as_float(half << 16); }
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ float4 peer_load(u32 address, u32 rank) {
  float4 v;
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 128-byte swizzle: rows of 128 bytes, groups of eight 1,024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 16) | ((address & 0x3FFFF) >> 4);
}
#define SUM(i) "+f"(d[i])
#define SUMS(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3), SUM(i + 4), SUM(i + 5), SUM(i + 6), SUM(i + 7)
__device__ __forceinline__ void multiply(float (&d)[40], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}, %40, %41, 1, 1, 1, "
      "0, 0;"
      : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
      : "l"(a), "l"(b));
}

__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_multiply() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_multiply() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
__device__ __forceinline__ void store_shared(u32 to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void clear16(u32 to) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to), "r"(0) : "memory");
}
__device__ __forceinline__ u32 memory_base() {
  extern __shared__ char memory[];
  return (shared_address(memory) + 1023) & ~1023u;
}
__device__ __forceinline__ void load4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load4t(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What follows is plain C++ over the instructions above.

enum Kind { NORM, NORM_GELU, ADD };

template <int N, int K, int BN, int S, int RING, Kind KIND>
__device__ __forceinline__ void product(const Product& p) {
  constexpr int THREADS = 2 * BN, DEPTH = K / S, SLICES = DEPTH / SLICE, WEIGHT_SLICE = BN * SLICE * 2;
  constexpr int STRIDE = BN + 4, OWN = MAX_ROWS / S, QUADS = BN / 4;
  static_assert(RING <= SLICES && MAX_ROWS * STRIDE * 4 <= SLICES * WEIGHT_SLICE + RING * ROWS_SLICE, "");
  const u32 base = memory_base();
  const u32 weights = base, ring = base + SLICES * WEIGHT_SLICE;
  const int t = threadIdx.x, tile = blockIdx.x / S, rank = blockIdx.x % S;
  let_next_begin();
  {
    const u16* from = p.weight + (size_t)tile * BN * K + rank * DEPTH;
    constexpr int CHUNKS = DEPTH / 8;  // 16 bytes each
#pragma unroll
    for (int i = 0; i < BN * CHUNKS / THREADS; ++i) {
      const int c = i * THREADS + t, row = c / CHUNKS, chunk = c % CHUNKS;
      copy16(weights + (chunk / 8) * WEIGHT_SLICE + row * 128 + (((chunk % 8) ^ (row & 7)) << 4),
             from + (size_t)row * K + chunk * 8);
    }
    commit();
  }
  // Of the sum over the cluster each block owns OWN rows: a thread four columns of every STEP-th.
  constexpr int STEP = THREADS / QUADS, COUNT = (OWN + STEP - 1) / STEP;
  const int quad = t % QUADS, column = tile * BN + quad * 4;
  const uint2 bias = *(const uint2*)(p.bias + column);
  uint2 next = {0, 0};
  if (KIND == ADD) next = *(const uint2*)(p.norm + column);
  wait_for_kernels();
  auto load_slice = [&](int s) {
    const u16* from = p.x + rank * DEPTH + s * SLICE;
#pragma unroll
    for (int i = 0; i < (MAX_ROWS * 8 + THREADS - 1) / THREADS; ++i) {
      const int c = i * THREADS + t, row = c / 8, chunk = c % 8;
      if (row < p.rows)
        copy16(ring + (s % RING) * ROWS_SLICE + row * 128 + ((chunk ^ (row & 7)) << 4),
               from + (size_t)row * K + chunk * 8);
    }
  };
#pragma unroll
  for (int s = 0; s < RING; ++s) {
    load_slice(s);
    commit();
  }
  // What the sum is combined with.
  float scale[COUNT];
  uint2 rest[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int own = i * STEP + t / QUADS, row = rank * OWN + own;
    const bool real = own < OWN && row < p.rows;
    rest[i] = {0, 0};
    if (KIND == ADD && real) rest[i] = *(const uint2*)(p.residual + (size_t)row * N + column);
    scale[i] = KIND != ADD && real && quad < p.parts ? p.squares[row * p.parts + quad] : 0.f;
  }
  float d[40];
#pragma unroll
  for (int i = 0; i < 40; ++i) d[i] = 0.f;
  const int group = t / 128;
#pragma unroll
  for (int s = 0; s < SLICES; ++s) {
    wait_copies<RING - 1>();
    show_copies();
    __syncthreads();
    begin_multiply();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply(d, descriptor(weights + s * WEIGHT_SLICE + group * 64 * 128 + k * 32),
               descriptor(ring + (s % RING) * ROWS_SLICE + k * 32));
    end_multiply();
    if (s + RING < SLICES) {
      wait_multiply();
      __syncthreads();
      load_slice(s + RING);
    }
    commit();
  }
  wait_multiply();
  __syncthreads();
  // The parts, transposed to rows of features, where the operands lay.
  {
    const int lane = t % 32, m = group * 64 + (t / 32 % 4) * 16 + lane / 4, n = (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < 10; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        store_shared(weights + (((8 * j + n + e % 2) * STRIDE + m + (e / 2) * 8) << 2), d[4 * j + e]);
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int own = i * STEP + t / QUADS, row = rank * OWN + own;
    const bool real = own < OWN && row < p.rows;
    float v[4] = {0.f, 0.f, 0.f, 0.f};
    if (real) {
      float4 part[S];
#pragma unroll
      for (int s = 0; s < S; ++s) part[s] = peer_load(weights + ((row * STRIDE + quad * 4) << 2), s);
#pragma unroll
      for (int s = 0; s < S; ++s) v[0] += part[s].x, v[1] += part[s].y, v[2] += part[s].z, v[3] += part[s].w;
    }
    if (KIND != ADD) {
#pragma unroll
      for (int apart = QUADS / 2; apart; apart /= 2)
        scale[i] += __shfl_xor_sync(0xFFFFFFFFu, scale[i], apart);
    }
    const float factor = KIND == ADD ? 1.f : rsqrtf(scale[i] / K + 1e-6f);
    const u32 biases[4] = {bias.x & 0xFFFF, bias.x >> 16, bias.y & 0xFFFF, bias.y >> 16};
    const u32 rests[4] = {rest[i].x & 0xFFFF, rest[i].x >> 16, rest[i].y & 0xFFFF, rest[i].y >> 16};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = v[e] * factor + wide(biases[e]);
      if (KIND == NORM_GELU)
        v[e] = v[e] / (1.f + __expf(-1.5957691216057308f * (v[e] + 0.044715f * v[e] * v[e] * v[e])));
      if (KIND == ADD) v[e] += wide(rests[e]);
    }
    const uint2 rounded = {pack(v[0], v[1]), pack(v[2], v[3])};
    if (real) *(uint2*)(p.out + (size_t)row * N + column) = rounded;
    if (KIND == ADD) {
      const float w[4] = {wide(rounded.x & 0xFFFF), wide(rounded.x >> 16), wide(rounded.y & 0xFFFF),
                          wide(rounded.y >> 16)};
      const uint2 scaled = {pack(w[0] * wide(next.x & 0xFFFF), w[1] * wide(next.x >> 16)),
                            pack(w[2] * wide(next.y & 0xFFFF), w[3] * wide(next.y >> 16))};
      if (real) *(uint2*)(p.scaled + (size_t)row * N + column) = scaled;
      float sum = real ? w[0] * w[0] + w[1] * w[1] + w[2] * w[2] + w[3] * w[3] : 0.f;
#pragma unroll
      for (int apart = QUADS / 2; apart; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
      if (real && quad == 0) p.squares_out[row * (N / BN) + tile] = sum;
    }
  }
  // No block may end while another reads its memory.
  cluster_arrive();
  cluster_wait();
}

extern "C" __global__ void __launch_bounds__(2 * QKV_COLUMNS, 2) __cluster_dims__(QKV_SPLITS, 1, 1)
    mingc_dit_qkv_early(const __grid_constant__ Product p) {
  product<3072, 1024, QKV_COLUMNS, QKV_SPLITS, QKV_RING, NORM>(p);
}
extern "C" __global__ void __launch_bounds__(2 * OUT_COLUMNS, 2) __cluster_dims__(OUT_SPLITS, 1, 1)
    mingc_dit_out_early(const __grid_constant__ Product p) {
  product<1024, 1024, OUT_COLUMNS, OUT_SPLITS, OUT_RING, ADD>(p);
}
extern "C" __global__ void __launch_bounds__(2 * UP_COLUMNS, 2) __cluster_dims__(UP_SPLITS, 1, 1)
    mingc_dit_up_early(const __grid_constant__ Product p) {
  product<4096, 1024, UP_COLUMNS, UP_SPLITS, UP_RING, NORM_GELU>(p);
}
extern "C" __global__ void __launch_bounds__(2 * DOWN_COLUMNS, 2) __cluster_dims__(DOWN_SPLITS, 1, 1)
    mingc_dit_down_early(const __grid_constant__ Product p) {
  product<1024, 4096, DOWN_COLUMNS, DOWN_SPLITS, DOWN_RING, ADD>(p);
}

// Attention of one head of one sequence of TOKENS: three warps of 16 queries.
struct Attention {
  const u16* qkv;    // (2, TOKENS, 3, 16, 64)
  const float* cos;  // (TOKENS, 32)
  const float* sin;
  u16* out;  // (2, TOKENS, 16, 64)
  int tokens;
};
__device__ __forceinline__ u32 turned(u32 pair, float c, float s) {
  const float even = wide(pair & 0xFFFF), odd = wide(pair >> 16);
  return pack(even * c - odd * s, odd * c + even * s);
}
extern "C" __global__ void __launch_bounds__(96)
    mingc_dit_attention_early(const __grid_constant__ Attention p) {
  constexpr int KEYS = 48;
  __shared__ __align__(128) char tiles[3 * KEYS * 128];
  __shared__ float tables[2][KEYS * 33];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, head = blockIdx.x % 16, sequence = blockIdx.x / 16;
  const u32 base = shared_address(tiles);
  let_next_begin();
  for (int i = t; i < KEYS * 32; i += 96) {
    const bool real = i / 32 < p.tokens;
    tables[0][i / 32 * 33 + i % 32] = real ? p.cos[i] : 0.f;
    tables[1][i / 32 * 33 + i % 32] = real ? p.sin[i] : 0.f;
  }
  wait_for_kernels();
#pragma unroll
  for (int i = 0; i < 3 * KEYS * 8 / 96; ++i) {
    const int c = i * 96 + t, part = c / (KEYS * 8), row = c / 8 % KEYS, chunk = c % 8;
    const u32 to = base + part * KEYS * 128 + row * 128 + ((chunk ^ (row & 7)) << 4);
    if (row < p.tokens)
      copy16(to, p.qkv + ((size_t)(sequence * p.tokens + row) * 3 + part) * 1024 + head * 64 + chunk * 8);
    else
      clear16(to);
  }
  commit();
  wait_copies<0>();
  __syncthreads();
  float score[6][4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 q[4];
    {
      const int row = warp * 16 + lane % 16, chunk = 2 * k + lane / 16;
      load4(q, base + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // rows lane/4 (+8), dims 16k + 2(lane%4) (+8)
        const int token = warp * 16 + lane / 4 + (e & 1) * 8, f = 8 * k + lane % 4 + (e / 2) * 4;
        q[e] = turned(q[e], tables[0][token * 33 + f], tables[1][token * 33 + f]);
      }
    }
#pragma unroll
    for (int j = 0; j < 3;
         ++j) {  // 16 keys at a time: matrices (keys 0-7, dims 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
      u32 key[4];
      const int row = j * 16 + lane % 8 + (lane / 16) * 8, chunk = 2 * k + (lane / 8 & 1);
      load4(key, base + KEYS * 128 + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = j * 16 + lane / 4 + (e / 2) * 8, f = 8 * k + lane % 4 + (e & 1) * 4;
        key[e] = turned(key[e], tables[0][token * 33 + f], tables[1][token * 33 + f]);
      }
      mma(score[2 * j], q, key[0], key[1]);
      mma(score[2 * j + 1], q, key[2], key[3]);
    }
  }
  float top[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 6; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = 8 * j + (lane % 4) * 2 + (e & 1);
      score[j][e] = key < p.tokens ? score[j][e] * 0.125f : -1e30f;
      top[e / 2] = fmaxf(top[e / 2], score[j][e]);
    }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
      top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], apart));
#pragma unroll
  for (int j = 0; j < 6; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e / 2] += score[j][e] = __expf(score[j][e] - top[e / 2]);
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) total[h] += __shfl_xor_sync(0xFFFFFFFFu, total[h], apart);
  float context[8][4] = {};
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const u32 a[4] = {pack(score[2 * j][0], score[2 * j][1]), pack(score[2 * j][2], score[2 * j][3]),
                      pack(score[2 * j + 1][0], score[2 * j + 1][1]),
                      pack(score[2 * j + 1][2], score[2 * j + 1][3])};
#pragma unroll
    for (int n = 0; n < 4;
         ++n) {  // 16 dims: matrices (keys 0-7, dims 0-7), (keys 8-15, dims 0-7), then dims 8-15
      u32 value[4];
      const int row = j * 16 + lane % 16, chunk = 2 * n + lane / 16;
      load4t(value, base + 2 * KEYS * 128 + row * 128 + ((chunk ^ (row & 7)) << 4));
      mma(context[2 * n], a, value[0], value[1]);
      mma(context[2 * n + 1], a, value[2], value[3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = warp * 16 + lane / 4 + h * 8;
    if (token < p.tokens) {
      u16* to = p.out + (size_t)(sequence * p.tokens + token) * 1024 + head * 64 + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < 8; ++n)
        *(u32*)(to + n * 8) = pack(context[n][2 * h] / total[h], context[n][2 * h + 1] / total[h]);
    }
  }
}

// Between two steps of the sampler: final norm, projection, guidance and ODE update of the last one, tokens
// of the next one. One cluster of 8 blocks; a block has 8 latent channels of the projection and 128 columns
// of the tokens.
struct Turn {
  const u16* first;         // (2, steps, 1024)
  const u16* history;       // (2, tokens - 5, 1024)
  const u16* embed;         // (1024, 64)
  const u16* embed_bias;    // (1024)
  const u16* project;       // (64, 1024)
  const u16* project_bias;  // (64)
  const u16* norm;          // (1024) of the first block
  const u16* scaled;        // (2 tokens, 1024) the last step's stream times the final norm's weight
  const float* squares;     // (2 tokens, parts)
  const float* state;       // (4, 64) before
  const float* kicks;       // (steps, 4, 64)
  const float* step_sizes;  // (steps)
  const float* guidance;    // (1)
  float* next_state;        // (4, 64)
  u16* x;                   // (2 tokens, 1024); its history is written before the first step and stays
  u16* x_scaled;
  float* x_squares;  // (2 tokens, 8)
  int tokens, parts, step, steps;
};
extern "C" __global__ void __launch_bounds__(256) __cluster_dims__(8, 1, 1)
    mingc_dit_turn_early(const __grid_constant__ Turn p) {
  constexpr int PATCH = 4, CHANNELS = 64, WIDTH = 1024, COLUMNS = 128;
  __shared__ __align__(16) float mine[8 * PATCH];  // [channel][latent]
  __shared__ float states[CHANNELS][PATCH];
  __shared__ __align__(16) u16 made[PATCH][COLUMNS];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, rank = blockIdx.x, channel = rank * 8 + warp;
  let_next_begin();
  uint4 projected[4], embedded[8];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    projected[i] = *(const uint4*)(p.project + channel * WIDTH + (i * 32 + lane) * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    embedded[i] = *(const uint4*)(p.embed + (rank * COLUMNS + t % COLUMNS) * CHANNELS + i * 8);
  wait_for_kernels();
  float state = 0.f;
  if (lane < PATCH) state = p.state[lane * CHANNELS + channel];
  if (p.step > 0) {
    float sum[2 * PATCH];
#pragma unroll
    for (int r = 0; r < 2 * PATCH; ++r) {
      const int row = r / PATCH * p.tokens + p.tokens - PATCH + r % PATCH;
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = *(const uint4*)(p.scaled + row * WIDTH + (i * 32 + lane) * 8);
      float squares = lane < p.parts ? p.squares[row * p.parts + lane] : 0.f;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 a[4] = {x[i].x, x[i].y, x[i].z, x[i].w},
                  b[4] = {projected[i].x, projected[i].y, projected[i].z, projected[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          total += wide(a[e] & 0xFFFF) * wide(b[e] & 0xFFFF) + wide(a[e] >> 16) * wide(b[e] >> 16);
      }
#pragma unroll
      for (int apart = 16; apart; apart /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFFu, total, apart);
        squares += __shfl_xor_sync(0xFFFFFFFFu, squares, apart);
      }
      sum[r] = total * rsqrtf(squares / WIDTH + 1e-6f) + wide(p.project_bias[channel]);
    }
    if (lane < PATCH) {
      float conditional = 0.f, free = 0.f;
#pragma unroll
      for (int r = 0; r < PATCH; ++r)
        if (lane == r) conditional = sum[r], free = sum[PATCH + r];
      const float velocity = conditional + p.guidance[0] * (conditional - free);
      state +=
          velocity * p.step_sizes[p.step - 1] + p.kicks[((p.step - 1) * PATCH + lane) * CHANNELS + channel];
      p.next_state[lane * CHANNELS + channel] = state;
    }
    if (p.step == p.steps) return;
  }
  if (lane < PATCH) mine[warp * PATCH + lane] = state;
  cluster_arrive();
  cluster_wait();
  if (t < CHANNELS) {
    const float4 v = peer_load(shared_address(mine) + t % 8 * 16, t / 8);
    states[t][0] = wide(pack(v.x, 0.f) & 0xFFFF), states[t][1] = wide(pack(v.y, 0.f) & 0xFFFF);
    states[t][2] = wide(pack(v.z, 0.f) & 0xFFFF), states[t][3] = wide(pack(v.w, 0.f) & 0xFFFF);
  }
  cluster_arrive();
  cluster_wait();
  {
    const int column = t % COLUMNS, row = t / COLUMNS * 2;
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 a[4] = {embedded[i].x, embedded[i].y, embedded[i].z, embedded[i].w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float w = e % 2 ? wide(a[e / 2] >> 16) : wide(a[e / 2] & 0xFFFF);
        total[0] += w * states[i * 8 + e][row];
        total[1] += w * states[i * 8 + e][row + 1];
      }
    }
    const float bias = wide(p.embed_bias[rank * COLUMNS + column]);
    made[row][column] = pack(total[0] + bias, 0.f) & 0xFFFF;
    made[row + 1][column] = pack(total[1] + bias, 0.f) & 0xFFFF;
  }
  __syncthreads();
  const int column = rank * COLUMNS + lane * 4, history = p.tokens - 1 - PATCH;
  const uint2 next = *(const uint2*)(p.norm + column);
  // Rows: the first token of either sequence, the patch of both, and once the history of either.
  for (int job = warp; job < 2 + 2 * PATCH + (p.step == 0 ? 2 * history : 0); job += 8) {
    int row;
    uint2 v;
    if (job < 2) {
      row = job * p.tokens;
      v = *(const uint2*)(p.first + ((size_t)job * p.steps + p.step) * WIDTH + column);
    } else if (job < 2 + 2 * PATCH) {
      row = (job - 2) / PATCH * p.tokens + 1 + history + (job - 2) % PATCH;
      v = *(const uint2*)(&made[(job - 2) % PATCH][lane * 4]);
    } else {
      const int h = job - 2 - 2 * PATCH;
      row = h / history * p.tokens + 1 + h % history;
      v = *(const uint2*)(p.history + (size_t)h * WIDTH + column);
    }
    const float w[4] = {wide(v.x & 0xFFFF), wide(v.x >> 16), wide(v.y & 0xFFFF), wide(v.y >> 16)};
    float sum = w[0] * w[0] + w[1] * w[1] + w[2] * w[2] + w[3] * w[3];
#pragma unroll
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
    *(uint2*)(p.x + (size_t)row * WIDTH + column) = v;
    const uint2 scaled = {pack(w[0] * wide(next.x & 0xFFFF), w[1] * wide(next.x >> 16)),
                          pack(w[2] * wide(next.y & 0xFFFF), w[3] * wide(next.y >> 16))};
    *(uint2*)(p.x_scaled + (size_t)row * WIDTH + column) = scaled;
    if (lane == 0) p.x_squares[row * 8 + rank] = sum;
  }
}
