// The DiT for few requests: GEMMs, the attention between them, and what runs before and between ODE steps.
//
// A tile of a GEMM has up to TILE_ROWS rows, or up to 8, of whole requests, so that a request's results do not depend on
// its batch. Weights are the first operand of the matrix instruction (64 outputs), rows the second. A cluster of thread blocks splits K: each block computes all outputs of the
// cluster over its part of K and owns some pairs of rows of the result. It writes its partial sums of the other rows
// into their owners' shared memory, and sums what it receives in a fixed order.
// Weights are loaded before the kernel waits for the previous one (programmatic dependent launch), while that one ends.
// flow_sampler.py launches the kernels and fills their structs; the block sizes come from mingc/artifacts/target.py.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int SLICE = 64;  // K of a slice: 128 bytes a row, the width of the swizzle

// A tensor map (CUtensorMap): address and box of a TMA copy.
struct alignas(64) Map {
  u64 words[16];
};

struct Gemm {
  Map weight_map;  // of weight: 64 of K, of 16 outputs the even ones before the odd ones
  Map x_map;       // of x: 64 of K, all rows
  const u16* x;          // (M, K) bf16; of `out` the (M, 3, 16, 64) that `qkv` made
  const float* squares;  // (M, parts) sums of squares of x, if a norm comes before
  const u16* weight;     // (N, K)
  const u16* bias;       // (N)
  const u16* residual;   // (M, N)
  const u16* norm;       // (N) weight of the next norm
  const float* cos;      // (tokens, 32): `qkv` rotates its queries and keys
  const float* sin;
  const u16* ahead;   // weights of a later kernel, to prefetch
  u16* out;           // (M, N)
  u16* scaled;        // (M, N) out times norm
  float* squares_out;  // (M, N / 64)
  int rows;
  int tile_rows;  // of one matrix instruction: of whole requests
  int parts;
  int tokens;
  int kept;  // tokens of a sequence that `out` keeps, its last ones
  int ahead_bytes;  // of `ahead`, prefetched by one block
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ float to_float(u32 half) { return __uint_as_float(half << 16); }
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
// A pair of adjacent dims, rotated by an angle.
__device__ __forceinline__ u32 turned(u32 pair, float c, float s) {
  const float even = to_float(pair & 0xFFFF), odd = to_float(pair >> 16);
  return pack(even * c - odd * s, odd * c + even * s);
}
__device__ __forceinline__ u32 peer_address(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Store four floats in the shared memory of a block of the cluster, counted by a barrier of that block.
__device__ __forceinline__ void push(u32 to, u32 barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
      : "memory");
}
// Barriers that complete after a number of bytes arrived.
__device__ __forceinline__ void make_barrier(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_bytes(u32 barrier) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" ::"r"(barrier)
      : "memory");
}
__device__ __forceinline__ void own_store(u32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float4 own_load(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void fetch_map(const Map* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const Map* map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_outputs(u32 to, const Map* map, int column, int output, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(output / 16), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void fetch_ahead(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Arrive only: makes no writes visible.
__device__ __forceinline__ void cluster_come() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
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
__device__ __forceinline__ void multiply(float (&d)[76], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n152k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
      "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
      "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75}, %76, %77, 1, 1, 1, 0, 0;"
      : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUM(72), SUM(73), SUM(74),
        SUM(75)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[40], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}, %40, %41, 1, 1, 1, "
      "0, 0;"
      : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[20], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}, %20, %21, 1, 1, 1, 0, 0;"
      : SUMS(0), SUMS(8), SUM(16), SUM(17), SUM(18), SUM(19)
      : "l"(a), "l"(b));
}
__device__ __forceinline__ void multiply(float (&d)[4], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
      : SUM(0), SUM(1), SUM(2), SUM(3)
      : "l"(a), "l"(b));
}

__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_multiply() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wait_multiply() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
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

// Below: plain C++ on top of the instructions above.

enum Kind { NORM_TURN, NORM_GELU, ADD };

// Sum over a cluster of S blocks of BN outputs for GROUPS times 8 rows, and the epilogue. Pairs of rows are assigned to
// the blocks round-robin; a warp takes 64 outputs of a pair at a time, a thread two of them.
template <int N, int K, int BN, int S, int GROUPS, Kind KIND>
struct Sum {
  static constexpr int WARPS = BN / 16, PAIRS = 4 * GROUPS, MOST = (PAIRS + S - 1) / S;
  static constexpr int COUNT = (MOST * BN / 64 + WARPS - 1) / WARPS;
  static constexpr int BYTES = S * MOST * BN * 8;
  static_assert((S == 2 || S % 4 == 0) && WARPS % (BN / 64) == 0, "");
  const Gemm& p;
  const u32 received, barrier;  // shared memory that `send` of the other blocks writes to
  const int rank, first_row, residual_row, rows, warp, lane, half, column;
  u32 bias, next, rest[COUNT][2];
  float scale[COUNT], cos[COUNT][2], sin[COUNT][2];

  // `rows` rows exist from first_row on; `residual_row` is the first one of the residual.
  __device__ __forceinline__ Sum(const Gemm& p, u32 received, u32 barrier, int tile, int rank, int first_row,
                                 int residual_row, int rows)
      : p(p),
        received(received),
        barrier(barrier),
        rank(rank),
        first_row(first_row),
        residual_row(residual_row),
        rows(rows),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        half(warp % (BN / 64)),
        column(tile * BN + half * 64 + lane * 2) {}
  __device__ __forceinline__ int local(int i) const { return (i * WARPS + warp) / (BN / 64); }
  __device__ __forceinline__ int row(int i) const { return 2 * (local(i) * S + rank); }
  __device__ __forceinline__ bool real(int i, int c) const { return local(i) < MOST && row(i) + c < rows; }

  // Bytes that the other blocks send.
  __device__ __forceinline__ u32 bytes() const { return (S - 1) * ((PAIRS - rank + S - 1) / S) * BN * 8; }
  // Before the kernel waits: loads of what no kernel writes.
  __device__ __forceinline__ void begin() {
    bias = *(const u32*)(p.bias + column);
    next = KIND == ADD ? *(const u32*)(p.norm + column) : 0;
    if (KIND == NORM_TURN) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const bool turns = column < 2 * K && real(i, c);  // queries and keys
          const int angle = (first_row + row(i) + c) % p.tokens * 32 + column % 64 / 2;
          cos[i][c] = turns ? p.cos[angle] : 1.f, sin[i][c] = turns ? p.sin[angle] : 0.f;
        }
    }
  }
  // Loads of what the epilogue adds or scales by.
  __device__ __forceinline__ void load_rest() {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int squares_row = first_row + row(i) + lane / 16;
      scale[i] = KIND != ADD && real(i, lane / 16) && lane % 16 < p.parts
                     ? p.squares[squares_row * p.parts + lane % 16]
                     : 0.f;
#pragma unroll
      for (int c = 0; c < 2; ++c)
        rest[i][c] =
            KIND == ADD && real(i, c) ? *(const u32*)(p.residual + (size_t)(residual_row + row(i) + c) * N + column) : 0;
    }
  }
  // Accumulators of the matrix instruction: rows 8 j + 2 (lane % 4) and the next, a pair of outputs.
  __device__ __forceinline__ void send(const float (&d)[4 * GROUPS]) {
    // Of four adjacent pairs of rows each block owns one, or each of two blocks owns two.
    constexpr int OWNERS = S < 4 ? S : 4, SETS = S / OWNERS;
    const int owner = lane % OWNERS, outputs = warp * 8 + lane / 4 + lane % 4 / OWNERS * (BN / 2);
    const u32 place = received + ((rank * MOST * BN / 2 + outputs) << 4);
    u32 to[SETS], barriers[SETS];
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      to[s] = peer_address(place, s * OWNERS + owner);
      barriers[s] = peer_address(barrier, s * OWNERS + owner);
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const int set = j % SETS, after = (j / SETS * (4 / OWNERS) * BN / 2) << 4;
      if (set * OWNERS + owner == rank)
        own_store(place + after, d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
      else
        push(to[set] + after, barriers[set], d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    }
  }
  __device__ __forceinline__ void finish() {
    if (KIND != ADD) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int apart = 8; apart; apart /= 2) scale[i] += __shfl_xor_sync(0xFFFFFFFFu, scale[i], apart);
    }
    __syncthreads();  // the block's own partial sums are stored
    wait_bytes(barrier);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float other = KIND == ADD ? 0.f : __shfl_xor_sync(0xFFFFFFFFu, scale[i], 16);
      float v[2][2] = {};
      if (real(i, 0)) {
        float4 part[S];
#pragma unroll
        for (int s = 0; s < S; ++s)
          part[s] = own_load(received + (((s * MOST + local(i)) * (BN / 2) + half * 32 + lane) << 4));
#pragma unroll
        for (int s = 0; s < S; ++s)
          v[0][0] += part[s].x, v[1][0] += part[s].y, v[0][1] += part[s].z, v[1][1] += part[s].w;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) finish_row(i, c, v[c], lane / 16 == c ? scale[i] : other);
    }
  }
  __device__ __forceinline__ void finish_row(int i, int c, float (&v)[2], float squares) {
    const float factor = KIND == ADD ? 1.f : rsqrtf(squares / K + 1e-6f);
    const int where = first_row + row(i) + c;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      v[e] = v[e] * factor + to_float(e ? bias >> 16 : bias & 0xFFFF);
      if (KIND == NORM_GELU)
        v[e] = __fdividef(
            v[e], 1.f + __expf(fminf(-1.5957691216057308f * (v[e] + 0.044715f * v[e] * v[e] * v[e]), 80.f)));
      if (KIND == ADD) v[e] += to_float(e ? rest[i][c] >> 16 : rest[i][c] & 0xFFFF);
    }
    u32 rounded = pack(v[0], v[1]);
    if (KIND == NORM_TURN) rounded = turned(rounded, cos[i][c], sin[i][c]);
    if (real(i, c)) *(u32*)(p.out + (size_t)where * N + column) = rounded;
    if (KIND == ADD) {
      const float w[2] = {to_float(rounded & 0xFFFF), to_float(rounded >> 16)};
      if (real(i, c))
        *(u32*)(p.scaled + (size_t)where * N + column) =
            pack(w[0] * to_float(next & 0xFFFF), w[1] * to_float(next >> 16));
      float sum = real(i, c) ? w[0] * w[0] + w[1] * w[1] : 0.f;
#pragma unroll
      for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
      if (real(i, c) && lane == 0) p.squares_out[where * (N / 64) + column / 64] = sum;
    }
  }
};

template <int ROWS, int N, int K, int BN, int S, int STAGES, Kind KIND>
__device__ __forceinline__ void gemm(const Gemm& p) {
  constexpr int DEPTH = K / S, SLICES = DEPTH / SLICE, WEIGHT_SLICE = BN * SLICE * 2, ROWS_SLICE = ROWS * SLICE * 2;
  using Total = Sum<N, K, BN, S, ROWS / 8, KIND>;
  // Partial sums of other blocks overwrite the weights, if possible except the last slice, and then the rows.
  constexpr bool SPARES_LAST = Total::BYTES <= (SLICES - 1) * WEIGHT_SLICE;
  static_assert(STAGES <= SLICES && Total::BYTES <= SLICES * WEIGHT_SLICE + STAGES * ROWS_SLICE, "");
  const u32 weights = memory_base(), ring = weights + SLICES * WEIGHT_SLICE, barriers = ring + STAGES * ROWS_SLICE;
  const int t = threadIdx.x, tile = blockIdx.x / S % (N / BN), rank = blockIdx.x % S;
  const int first_row = blockIdx.x / S / (N / BN) * p.tile_rows;
  Total sum(p, weights, barriers + 8 * SLICES, tile, rank, first_row, first_row,
            min(p.tile_rows, p.rows - first_row));
  if (t == 0) {
    for (int s = 0; s <= SLICES; ++s) make_barrier(barriers + 8 * s);
    show_barriers();
    expect_bytes(sum.barrier, sum.bytes());
    for (int s = 0; s < SLICES; ++s) {
      expect_bytes(barriers + 8 * s, WEIGHT_SLICE + ROWS_SLICE);
      copy_outputs(weights + s * WEIGHT_SLICE, &p.weight_map, rank * DEPTH + s * SLICE, tile * BN, barriers + 8 * s);
    }
    fetch_map(&p.x_map);
    if (p.ahead_bytes) fetch_ahead((const char*)p.ahead + (size_t)blockIdx.x * p.ahead_bytes, p.ahead_bytes);
  }
  sum.begin();
  __syncthreads();
  wait_for_kernels();
  auto load_slice = [&](int s) {
    if (t == 0)
      copy_rows(ring + (s % STAGES) * ROWS_SLICE, &p.x_map, rank * DEPTH + s * SLICE, first_row, barriers + 8 * s);
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) load_slice(s);
  sum.load_rest();
  let_next_begin();
  float d[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) d[i] = 0.f;
  const int group = t / 128;
#pragma unroll
  for (int s = 0; s < SLICES; ++s) {
    wait_bytes(barriers + 8 * s);
    begin_multiply();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply(d, descriptor(weights + s * WEIGHT_SLICE + group * 64 * 128 + k * 32),
               descriptor(ring + (s % STAGES) * ROWS_SLICE + k * 32));
    end_multiply();
    if (s > 0 && s - 1 + STAGES < SLICES) {  // the previous slice has been multiplied
      wait_multiply<1>();
      __syncthreads();
      load_slice(s - 1 + STAGES);
    }
  }
  wait_multiply<SPARES_LAST ? 1 : 0>();
  cluster_come();
  wait_multiply<0>();
  cluster_wait();
  sum.send(d);
  sum.finish();
}

// Thread blocks that fit the shared memory of a multiprocessor, which decides how many registers a thread gets.
__host__ __device__ constexpr int blocks_that_fit(int rows, int depth, int block_n, int stages) {
  return 2 * (depth / SLICE * block_n + stages * rows) * SLICE * 2 + 2 * (128 + 1024 + 1024) <= 228 * 1024 ? 2 : 1;
}
#define GEMM(name, rows, outputs, depth, stages, CONFIG, kind)                                                \
  extern "C" __global__ void __launch_bounds__(                                                               \
      2 * CONFIG##_BLOCK_N, blocks_that_fit(rows, depth / CONFIG##_CLUSTER_SIZE, CONFIG##_BLOCK_N, stages))   \
      __cluster_dims__(CONFIG##_CLUSTER_SIZE, 1, 1)                                                           \
      mingc_dit_##name##_pdl(const __grid_constant__ Gemm p) {                                                \
    gemm<rows, outputs, depth, CONFIG##_BLOCK_N, CONFIG##_CLUSTER_SIZE, stages, kind>(p);                     \
  }
GEMM(qkv, TILE_ROWS, 3072, 1024, QKV_NUM_STAGES, QKV, NORM_TURN)
GEMM(up, TILE_ROWS, 4096, 1024, UP_NUM_STAGES, UP, NORM_GELU)
GEMM(down, TILE_ROWS, 1024, 4096, DOWN_NUM_STAGES, DOWN, ADD)
GEMM(qkv_few, 8, 3072, 1024, 1024 / SLICE / QKV_CLUSTER_SIZE, QKV, NORM_TURN)
GEMM(up_few, 8, 4096, 1024, 1024 / SLICE / UP_CLUSTER_SIZE, UP, NORM_GELU)
GEMM(down_few, 8, 1024, 4096, 4096 / SLICE / DOWN_CLUSTER_SIZE, DOWN, ADD)

// Attention of one warp: 16 queries of a head over at most 48 keys. Tiles of 48 tokens by 64 dims; the output replaces
// the queries.
constexpr int KEYS = 48, TILE = KEYS * 128;
__device__ __forceinline__ void attend(u32 queries, u32 keys, u32 values, int first, int tokens) {
  const int lane = threadIdx.x % 32;
  float score[6][4] = {};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 q[4];
    {
      const int row = first + lane % 16, chunk = 2 * k + lane / 16;
      load4(q, queries + row * 128 + ((chunk ^ (row & 7)) << 4));
    }
#pragma unroll
    for (int j = 0; j < 3;
         ++j) {  // 16 keys at a time: matrices (keys 0-7, dims 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15)
      u32 key[4];
      const int row = j * 16 + lane % 8 + (lane / 16) * 8, chunk = 2 * k + (lane / 8 & 1);
      load4(key, keys + row * 128 + ((chunk ^ (row & 7)) << 4));
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
      score[j][e] = key < tokens ? score[j][e] * 0.125f : -1e30f;
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
      load4t(value, values + row * 128 + ((chunk ^ (row & 7)) << 4));
      mma(context[2 * n], a, value[0], value[1]);
      mma(context[2 * n + 1], a, value[2], value[3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first + lane / 4 + h * 8;
    const float share = 1.f / total[h];
#pragma unroll
    for (int n = 0; n < 8; ++n)
      store_shared(queries + row * 128 + ((n ^ (row & 7)) << 4) + lane % 4 * 4,
                   pack(context[n][2 * h] * share, context[n][2 * h + 1] * share));
  }
}

// Attention and the output projection of one sequence, at most KEPT tokens of it: a block has the K of two heads, whose
// attention it repeats in all tiles, and 128 outputs.
template <int KEPT>
__device__ __forceinline__ void attend_and_project(const Gemm& p) {
  constexpr int BN = 128, S = 8, WEIGHT_SLICE = BN * 128;
  using Total = Sum<1024, 1024, BN, S, KEPT / 8, ADD>;
  static_assert(Total::BYTES <= 4 * TILE, "");  // partial sums of other blocks overwrite keys and values
  const u32 weights = memory_base(), tiles = weights + 2 * WEIGHT_SLICE, barriers = tiles + 6 * TILE;
  const int t = threadIdx.x, warp = t / 32, sequence = blockIdx.x / 64, tile = blockIdx.x / S % 8,
            rank = blockIdx.x % S;
  const int first_row = sequence * p.tokens, first_query = first_row + p.tokens - p.kept;
  Total sum(p, tiles + 2 * TILE, barriers + 24, tile, rank, sequence * p.kept, first_query, p.kept);
  if (t == 0) {
    for (int i = 0; i < 4; ++i) make_barrier(barriers + 8 * i);
    show_barriers();
    expect_bytes(sum.barrier, sum.bytes());
    expect_bytes(barriers, 2 * WEIGHT_SLICE);
    for (int s = 0; s < 2; ++s)
      copy_outputs(weights + s * WEIGHT_SLICE, &p.weight_map, rank * 128 + s * SLICE, tile * BN, barriers);
    fetch_map(&p.x_map);
    if (p.ahead_bytes) fetch_ahead((const char*)p.ahead + (size_t)blockIdx.x * p.ahead_bytes, p.ahead_bytes);
  }
  sum.begin();
  __syncthreads();
  wait_for_kernels();
  // Queries of both heads, keys of both, then values of both. Tokens after the last belong to another sequence or are
  // zeros: their queries are not stored, their keys get no weight.
  if (t == 0) {
    expect_bytes(barriers + 8, 4 * TILE);
    expect_bytes(barriers + 16, 2 * TILE);
    for (int i = 0; i < 6; ++i)
      copy_rows(tiles + i * TILE, &p.x_map, i / 2 * 1024 + rank * 128 + i % 2 * 64, i < 2 ? first_query : first_row,
                barriers + (i < 4 ? 8 : 16));
  }
  sum.load_rest();
  let_next_begin();
  wait_bytes(barriers + 8);
  wait_bytes(barriers + 16);
  if (warp < 6 && warp % 3 * 16 < p.kept) {
    const int head = warp / 3;
    attend(tiles + head * TILE, tiles + (2 + head) * TILE, tiles + (4 + head) * TILE, warp % 3 * 16, p.tokens);
    show_copies();
  }
  __syncthreads();
  cluster_come();
  wait_bytes(barriers);
  float d[KEPT / 2];
#pragma unroll
  for (int i = 0; i < KEPT / 2; ++i) d[i] = 0.f;
  begin_multiply();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    multiply(d, descriptor(weights + k / 4 * WEIGHT_SLICE + warp / 4 * 64 * 128 + k % 4 * 32),
             descriptor(tiles + k / 4 * TILE + k % 4 * 32));
  end_multiply();
  wait_multiply<0>();
  cluster_wait();
  sum.send(d);
  sum.finish();
}
extern "C" __global__ void __launch_bounds__(256, 2) __cluster_dims__(8, 1, 1)
    mingc_dit_out_pdl(const __grid_constant__ Gemm p) {
  attend_and_project<40>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) __cluster_dims__(8, 1, 1)
    mingc_dit_out_few_pdl(const __grid_constant__ Gemm p) {
  attend_and_project<8>(p);
}

#ifdef PROJECT_BLOCK_N
// For more sequences: attention alone, of two heads of a sequence a block, and the output projection as a GEMM.
extern "C" __global__ void __launch_bounds__(192) mingc_dit_attend_pdl(const __grid_constant__ Gemm p) {
  const u32 tiles = memory_base(), barrier = tiles + 6 * TILE;
  const int t = threadIdx.x, warp = t / 32, sequence = blockIdx.x / 8, pair = blockIdx.x % 8;
  const int first_row = sequence * p.tokens;
  if (t == 0) {
    make_barrier(barrier);
    show_barriers();
    fetch_map(&p.x_map);
    if (p.ahead_bytes) fetch_ahead((const char*)p.ahead + (size_t)blockIdx.x * p.ahead_bytes, p.ahead_bytes);
  }
  __syncthreads();
  wait_for_kernels();
  if (t == 0) {
    expect_bytes(barrier, 6 * TILE);
    for (int i = 0; i < 6; ++i)
      copy_rows(tiles + i * TILE, &p.x_map, i / 2 * 1024 + pair * 128 + i % 2 * 64, first_row, barrier);
  }
  let_next_begin();
  wait_bytes(barrier);
  const int head = warp / 3;
  if (warp % 3 * 16 < p.tokens)
    attend(tiles + head * TILE, tiles + (2 + head) * TILE, tiles + (4 + head) * TILE, warp % 3 * 16, p.tokens);
  __syncthreads();
  for (int i = t; i < p.tokens * 16; i += 192) {
    const int row = i / 16, half = i / 8 % 2, chunk = i % 8;
    *(float4*)(p.out + (size_t)(first_row + row) * 1024 + pair * 128 + half * 64 + chunk * 8) =
        own_load(tiles + half * TILE + row * 128 + ((chunk ^ (row & 7)) << 4));
  }
}
GEMM(project, TILE_ROWS, 1024, 1024, PROJECT_NUM_STAGES, PROJECT, ADD)
#endif

// Before all ODE steps: the inputs that they share, and the stop probability.
//
// Blocks of 8 warps: ENTER_CONDITION blocks compute the first tokens, a warp one output of the condition's GEMV; then
// ENTER_HISTORY blocks the history tokens, a warp 16 outputs of the embedding; the last block the stop head.
struct Enter {
  const u16* hidden;          // (requests, 896)
  const float* history;       // (requests, 32, 64)
  const u16* condition;       // (1024, 896)
  const u16* condition_bias;  // (1024)
  const float* times;         // (steps, 1024)
  const u16* embed;           // (1024, 64)
  const u16* embed_bias;      // (1024)
  const u16* stop;            // (2, 896)
  const u16* stop_bias;       // (2)
  u16* first;                 // (requests, 2, steps, 1024): with the hidden state, then without
  u16* tokens;                // (requests, 32, 1024)
  float* probability;         // (requests)
  int steps;
};
constexpr int WIDTH = 1024, PATCH = 4, CHANNELS = 64, HIDDEN = 896;
constexpr int HISTORY = 32, ENTER_CONDITION = WIDTH / 8, ENTER_HISTORY = WIDTH / 128, ENTER_BLOCKS = ENTER_CONDITION + ENTER_HISTORY + 1;

__device__ __forceinline__ float dot8(uint4 x, uint4 w) {
  const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {w.x, w.y, w.z, w.w};
  float total = 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    total += to_float(a[e] & 0xFFFF) * to_float(b[e] & 0xFFFF) + to_float(a[e] >> 16) * to_float(b[e] >> 16);
  return total;
}
__device__ __forceinline__ u32 rounded(float v) { return pack(v, 0.f) & 0xFFFF; }

extern "C" __global__ void __launch_bounds__(256) mingc_dit_enter_pdl(const __grid_constant__ Enter p) {
  __shared__ float logits[2];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, block = blockIdx.x % ENTER_BLOCKS;
  const int request = blockIdx.x / ENTER_BLOCKS;
  constexpr int PIECES = (HIDDEN / 8 + 31) / 32;
  const uint4 none = {0, 0, 0, 0};
  let_next_begin();
  if (block >= ENTER_CONDITION && block < ENTER_CONDITION + ENTER_HISTORY) {
    // Outputs are the first operand (16), tokens the second (four times 8). A thread has 8 adjacent channels of both:
    // their order within the instruction does not matter as long as it is the same for both.
    const int column = (block - ENTER_CONDITION) * 128 + warp * 16 + lane / 4, channel = lane % 4 * 8;
    uint4 w[2][2];
    float bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bias[h] = to_float(p.embed_bias[column + 8 * h]);
#pragma unroll
      for (int c = 0; c < 2; ++c)
        w[h][c] = *(const uint4*)(p.embed + (column + 8 * h) * CHANNELS + c * 32 + channel);
    }
    wait_for_kernels();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float sum[4] = {};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = request * HISTORY + j * 8 + lane / 4;
        const float4* at = (const float4*)(p.history + token * CHANNELS + c * 32 + channel);
        const float4 low = at[0], high = at[1];
        const u32 a[4] = {w[0][c].x, w[1][c].x, w[0][c].y, w[1][c].y},
                  b[4] = {w[0][c].z, w[1][c].z, w[0][c].w, w[1][c].w};
        mma(sum, a, pack(low.x, low.y), pack(low.z, low.w));
        mma(sum, b, pack(high.x, high.y), pack(high.z, high.w));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        p.tokens[(request * HISTORY + j * 8 + lane % 4 * 2 + e % 2) * WIDTH + column + e / 2 * 8] =
            rounded(sum[e] + bias[e / 2]);
    }
    return;
  }
  const bool is_stop = block >= ENTER_CONDITION;
  const int output = is_stop ? warp % 2 : block * 8 + warp;
  const u16* matrix = is_stop ? p.stop : p.condition;
  const float bias = to_float(is_stop ? p.stop_bias[output] : p.condition_bias[output]);
  uint4 w[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    w[i] = i * 32 + lane < HIDDEN / 8 ? *(const uint4*)(matrix + output * HIDDEN + (i * 32 + lane) * 8) : none;
  const float time = !is_stop && lane < p.steps ? p.times[lane * WIDTH + output] : 0.f;
  wait_for_kernels();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; ++i)
    if (i * 32 + lane < HIDDEN / 8) sum += dot8(*(const uint4*)(p.hidden + request * HIDDEN + (i * 32 + lane) * 8), w[i]);
#pragma unroll
  for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
  const float made = to_float(rounded(sum + bias));
  if (is_stop) {
    if (warp < 2 && lane == 0) logits[warp] = made;
    __syncthreads();
    if (t == 0) p.probability[request] = 1.f / (1.f + __expf(logits[0] - logits[1]));
  } else if (lane < p.steps) {
    u16* first = p.first + (request * 2 * p.steps + lane) * WIDTH + output;
    first[0] = rounded(made + time);
    first[p.steps * WIDTH] = rounded(bias + time);
  }
}

// Between two ODE steps: final norm, projection, guidance and update of the last step, tokens of the next step, or of
// the aggregator after the last step. A request has a cluster of 8 blocks; a block has 8 latent channels of the projection and 128
// columns of the tokens.
struct Turn {
  const u16* first;         // (requests, sequences, first_stride): the first token of each; or one for all, stride 0
  const u16* history;       // (requests, history, 1024): the tokens after it, the same in all sequences and steps
  const u16* embed;         // (1024, 64)
  const u16* embed_bias;    // (1024)
  const u16* project;       // (64, 1024)
  const u16* project_bias;  // (64)
  const u16* norm;          // (1024) of the next transformer's first block
  const u16* scaled;        // (requests, 2 before, 1024) the last step's stream times the final norm's weight
  const float* squares;     // (requests, 2 before, parts)
  const float* state;       // (requests, 4, 64) before
  const float* noise;       // (requests, noise_stride) noise (4, 64) that the last step adds,
  const float* sigma;       // (requests) times this,
  const float* temperature;  // (requests) and the root of this,
  const float* step_size;   // (1) and of this
  const float* guidance;    // (requests)
  float* next_state;        // (requests, 4, 64)
  u16* x;                   // (requests, sequences tokens, 1024)
  u16* x_scaled;
  float* x_squares;  // (requests, sequences tokens, 8)
  int before, parts;  // tokens of a sequence of the last step; 0 before the first step
  int tokens, sequences, first_stride, history_tokens, noise_stride;
};
extern "C" __global__ void __launch_bounds__(256) __cluster_dims__(8, 1, 1)
    mingc_dit_turn_pdl(const __grid_constant__ Turn p) {
  constexpr int COLUMNS = 128, WARPS = 8, BLOCKS = 8, OWN = CHANNELS / BLOCKS;
  __shared__ __align__(16) float sums[WARPS][2 * PATCH][OWN];
  __shared__ float scales[2 * PATCH];
  __shared__ __align__(16) u16 own[PATCH][OWN];
  __shared__ __align__(16) u16 states[PATCH][CHANNELS];
  __shared__ __align__(16) u16 made[PATCH][COLUMNS];
  __shared__ __align__(8) u64 came[1];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, group = lane / 4, part = lane % 4 * 8;
  const int rank = blockIdx.x % BLOCKS, request = blockIdx.x / BLOCKS;
  const u32 barrier = shared_address(came);
  let_next_begin();
  if (t == 0) {
    make_barrier(barrier);
    show_barriers();
    expect_bytes(barrier, PATCH * CHANNELS * 2);
  }
  // GEMM by warps: as in `mingc_dit_enter_pdl` a thread has 8 adjacent values of K of both operands.
  uint4 projected[4], embedded[2][2];
  float embed_bias[2];
#pragma unroll
  for (int c = 0; c < 4; ++c)
    projected[c] = *(const uint4*)(p.project + (rank * OWN + group) * WIDTH + warp * 128 + c * 32 + part);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = rank * COLUMNS + warp * 16 + group + 8 * h;
    embed_bias[h] = to_float(p.embed_bias[column]);
#pragma unroll
    for (int c = 0; c < 2; ++c) embedded[h][c] = *(const uint4*)(p.embed + column * CHANNELS + c * 32 + part);
  }
  const int latent = lane % PATCH, channel = rank * OWN + lane / PATCH, place = latent * CHANNELS + channel;
  const float bias = to_float(p.project_bias[channel]);
  const int column = rank * COLUMNS + lane * 4;
  const uint2 next = *(const uint2*)(p.norm + column);
  cluster_come();
  wait_for_kernels();
  float state = p.state[request * PATCH * CHANNELS + place], guidance = 0.f, kick = 0.f;
  uint2 row = {0, 0};
  if (warp >= PATCH && warp < PATCH + p.sequences)
    row = *(const uint2*)(p.first + (size_t)(request * p.sequences + warp - PATCH) * p.first_stride + column);
  if (p.before) {
    guidance = p.guidance[request];
    kick = p.noise[request * p.noise_stride + place] *
           (p.sigma[request] * sqrtf(p.temperature[request]) * sqrtf(p.step_size[0]));
    const u16* at = p.scaled + ((2 * request + group / PATCH) * p.before + p.before - PATCH + group % PATCH) * WIDTH +
                    warp * 128;
    uint4 x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = *(const uint4*)(at + c * 32 + part);
    const int squares_row = (2 * request + warp / PATCH) * p.before + p.before - PATCH + warp % PATCH;
    float squares = lane < p.parts ? p.squares[squares_row * p.parts + lane] : 0.f;
    float sum[4] = {};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const u32 a[4] = {x[c].x, 0, x[c].y, 0}, b[4] = {x[c].z, 0, x[c].w, 0};
      mma(sum, a, projected[c].x, projected[c].y);
      mma(sum, b, projected[c].z, projected[c].w);
    }
    sums[warp][group][lane % 4 * 2] = sum[0], sums[warp][group][lane % 4 * 2 + 1] = sum[1];
#pragma unroll
    for (int apart = 16; apart; apart /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, apart);
    if (lane == 0) scales[warp] = rsqrtf(squares / WIDTH + 1e-6f);
    __syncthreads();
  }
  if (warp == 0) {
    if (p.before) {
      float conditional = 0.f, free = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w)
        conditional += sums[w][latent][lane / PATCH], free += sums[w][PATCH + latent][lane / PATCH];
      conditional = conditional * scales[latent] + bias, free = free * scales[PATCH + latent] + bias;
      state += (conditional + guidance * (conditional - free)) * p.step_size[0] + kick;
      p.next_state[request * PATCH * CHANNELS + place] = state;
    }
    own[latent][lane / PATCH] = rounded(state);
    __syncwarp();
  }
  cluster_wait();  // the barriers of all blocks are initialized
  if (warp == 0) {
    const float4 v = *(const float4*)own[latent];
    push(peer_address(shared_address(states[latent]) + rank * OWN * 2, lane / PATCH),
         peer_address(barrier, lane / PATCH), v.x, v.y, v.z, v.w);
  }
  wait_bytes(barrier);
  float sum[4] = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    uint4 s = {0, 0, 0, 0};
    if (group < PATCH) s = *(const uint4*)(states[group] + c * 32 + part);
    const u32 a[4] = {embedded[0][c].x, embedded[1][c].x, embedded[0][c].y, embedded[1][c].y},
              b[4] = {embedded[0][c].z, embedded[1][c].z, embedded[0][c].w, embedded[1][c].w};
    mma(sum, a, s.x, s.y);
    mma(sum, b, s.z, s.w);
  }
  if (lane % 4 < PATCH / 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      made[lane % 4 * 2 + e % 2][warp * 16 + group + e / 2 * 8] = rounded(sum[e] + embed_bias[e / 2]);
  }
  __syncthreads();
  // Store a row of tokens, once or in every sequence.
  auto write = [&](uint2 v, int token, int copies) {
    int place = request * p.sequences * p.tokens + token;
    const float w[4] = {to_float(v.x & 0xFFFF), to_float(v.x >> 16), to_float(v.y & 0xFFFF), to_float(v.y >> 16)};
    const uint2 scaled = {pack(w[0] * to_float(next.x & 0xFFFF), w[1] * to_float(next.x >> 16)),
                          pack(w[2] * to_float(next.y & 0xFFFF), w[3] * to_float(next.y >> 16))};
    float sum = w[0] * w[0] + w[1] * w[1] + w[2] * w[2] + w[3] * w[3];
#pragma unroll
    for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
    for (int s = 0; s < copies; ++s, place += p.tokens) {
      *(uint2*)(p.x + (size_t)place * WIDTH + column) = v;
      *(uint2*)(p.x_scaled + (size_t)place * WIDTH + column) = scaled;
      if (lane == 0) p.x_squares[place * BLOCKS + rank] = sum;
    }
  };
  if (warp < PATCH)
    write(*(const uint2*)(made[warp] + lane * 4), p.tokens - PATCH + warp, p.sequences);
  else if (warp < PATCH + p.sequences)
    write(row, (warp - PATCH) * p.tokens, 1);
  for (int h = warp; h < p.history_tokens; h += WARPS)
    write(*(const uint2*)(p.history + (size_t)(request * HISTORY + h) * WIDTH + column), 1 + h, p.sequences);
}
