// Routed experts with INT4 weights (mingc.kernels.quantized): the first GEMM with SwiGLU, and the second GEMM.
//
// A block computes 128 or 256 outputs for up to ROWS rows of one expert. Weights are the first operand of the matrix
// instruction and go from memory to its registers: a thread loads 16 bytes of a row, 32 consecutive inputs. A sum over
// inputs has any order, as long as weights and rows have the same one, so rows are stored in the order of these loads:
// in each group of 128 inputs, input c * 32 + w * 8 + i (c, w < 4) is at w * 32 + c * 8 + place_of(i), where thread c of
// four reads what its w-th word of weights needs.
// A weight is used as 136 + value, which takes one instruction for two; sums start at -136 times the sum of the inputs.
//
// Defined by the launcher: ROWS; STAGES of shared memory, each with CHUNK groups of a block's rows; MAX_GROUPS of a row.
// Shape letters: T tokens, K experts per token, D hidden size, F intermediate size, R = T K pairs sorted by expert.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int GROUP = 128;  // inputs that share a scale
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int AHEAD = 2;                           // groups of weights in registers
constexpr int ROW_BYTES = CHUNK * GROUP * 2 + 64;  // of a stage; 64 more keep two adjacent rows in different banks

struct Tokens {
  const uint4* x;  // (T, D) bf16
  uint4* out;      // (T, D) bf16 in the order above
  float* sums;     // (T, D / 128) -136 times the sum of each group
  int pieces;      // T D / 8
};

struct Experts {
  const u16* x;         // up: (T, D) bf16 in the order above; down: (R, F)
  const float* sums;    // -136 times the sum of each group of x: (T, D / 128) or (R, F / 128)
  const int* order;     // (R) pair of each sorted row
  const int* table;     // (3, table_width) expert or -1, first row, end row of each block
  const uint4* weight;  // (E, 2F, D) or (E, D, F) values of four bits
  const u16* scales;    // (E, 2F, D / 128) bf16 or (E, D, F / 128)
  u16* out;             // up: hidden (R, F) in the order above; down: (R, D) in the order of pairs
  float* out_sums;      // up: (R, F / 128)
  int top_k;
  int depth;  // D or F
  int width;  // F or D
  int table_width;
};

struct Shared {
  unsigned char rows[STAGES][ROWS * ROW_BYTES];
  float sums[MAX_GROUPS][ROWS];
};

struct alignas(2 * CHUNK) Scales {
  u16 of_group[CHUNK];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float to_float(u32 half) { return __uint_as_float(half << 16); }
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ u16 to_bfloat16(float value) { return (u16)pack(value, 0.f); }
__device__ __forceinline__ float rounded(float value) { return to_float(to_bfloat16(value)); }
__device__ __forceinline__ int place_of(int i) { return i < 4 ? 2 * i : 2 * i - 7; }
__device__ __forceinline__ void copy_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT)); }
__device__ __forceinline__ uint4 load_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
// The values in bits 0 to 3 and 16 to 19, as two bfloat16 numbers 136 + value.
__device__ __forceinline__ u32 two_values(u32 word) {
  u32 out;
  asm("lop3.b32 %0, %1, 0x000F000F, 0x43084308, 0x6A;" : "=r"(out) : "r"(word));
  return out;
}
__device__ __forceinline__ u32 word_of(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }
__device__ __forceinline__ void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Products of two tiles of 16 weight rows, a warp's, with TILES tiles of 8 rows: total[tile of weights][tile of rows].
//   sources: offset of row `row` (of the block) in x, by a function
//   weights, scales: of a thread's row lane / 4 of each tile of weights; it also has the row 8 below
template <int TILES, class Source>
__device__ __forceinline__ void multiply_rows(
    Shared& shared, const u16* x, Source source, const uint4* const (&weights)[2], const u16* const (&scales)[2],
    int groups, float (&total)[2][TILES][4]) {
  constexpr int PIECES = CHUNK * GROUP / 8;  // of 16 bytes in a row
  constexpr int PASSES = (8 * TILES * PIECES + THREADS - 1) / THREADS;
  const int lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
  const int chunks = groups / CHUNK;
  const int copied_row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  u32 sources[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) sources[i] = source(copied_row + i * (THREADS / PIECES)) + piece * 8;
  auto copy_chunk = [&](int chunk) {
    if (chunk < chunks) {
      const u32 to = shared_address(shared.rows[chunk % STAGES]) + copied_row * ROW_BYTES + piece * 16;
#pragma unroll
      for (int i = 0; i < PASSES; i++)
        if (copied_row + i * (THREADS / PIECES) < 8 * TILES)
          copy_16(to + i * (THREADS / PIECES) * ROW_BYTES, x + sources[i] + chunk * (CHUNK * GROUP));
    }
    commit_copies();
  };
  uint4 ahead[AHEAD][4];
#pragma unroll
  for (int g = 0; g < AHEAD; g++)
#pragma unroll
    for (int r = 0; r < 4; r++) ahead[g][r] = load_once(weights[r / 2] + r % 2 * 32 * groups + g * 4);
  Scales factors[4];
#pragma unroll
  for (int r = 0; r < 4; r++) factors[r] = *(const Scales*)(scales[r / 2] + r % 2 * 8 * groups);
  for (int chunk = 0; chunk < STAGES - 1; chunk++) copy_chunk(chunk);
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[t][n][i] = 0.f;

  for (int chunk = 0; chunk < chunks; chunk++) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    copy_chunk(chunk + STAGES - 1);
    Scales next_factors[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
      next_factors[r] = *(const Scales*)(scales[r / 2] + r % 2 * 8 * groups + min(chunk + 1, chunks - 1) * CHUNK);
    const u32 rows = shared_address(shared.rows[chunk % STAGES]) + quad * ROW_BYTES + c * 16;
#pragma unroll
    for (int g = 0; g < CHUNK; g++) {
      const int group = chunk * CHUNK + g;
      float part[2][TILES][4];
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const float2 sum = *(const float2*)&shared.sums[group][n * 8 + 2 * c];
#pragma unroll
        for (int t = 0; t < 2; t++) {
          part[t][n][0] = part[t][n][2] = sum.x;
          part[t][n][1] = part[t][n][3] = sum.y;
        }
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        uint4 b[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) b[n] = load_shared(rows + n * 8 * ROW_BYTES + g * (GROUP * 2) + w * 64);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const u32 upper = word_of(ahead[g % AHEAD][2 * t], w), lower = word_of(ahead[g % AHEAD][2 * t + 1], w);
          const u32 a0 = two_values(upper), a1 = two_values(lower);
          const u32 a2 = two_values(upper >> 4), a3 = two_values(lower >> 4);
          const u32 a4 = two_values(upper >> 8), a5 = two_values(lower >> 8);
          const u32 a6 = two_values(upper >> 12), a7 = two_values(lower >> 12);
#pragma unroll
          for (int n = 0; n < TILES; n++) {
            multiply(part[t][n], a0, a1, a2, a3, b[n].x, b[n].y);
            multiply(part[t][n], a4, a5, a6, a7, b[n].z, b[n].w);
          }
        }
      }
      // Beyond the end the last group is loaded again.
#pragma unroll
      for (int r = 0; r < 4; r++)
        ahead[g % AHEAD][r] = load_once(weights[r / 2] + r % 2 * 32 * groups + min(group + AHEAD, groups - 1) * 4);
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            total[t][n][i] += to_float(factors[2 * t + i / 2].of_group[g]) * part[t][n][i];
    }
#pragma unroll
    for (int r = 0; r < 4; r++) factors[r] = next_factors[r];
  }
  wait_for_copies<0>();
  __syncthreads();  // the stages are free
}

// Sums of the groups of a block's rows; `source` gives the row of x.
template <class Source>
__device__ __forceinline__ void load_sums(Shared& shared, const Experts& a, int rows, Source source) {
  const int groups = a.depth / GROUP;
  for (int place = threadIdx.x; place < groups * rows; place += THREADS)
    shared.sums[place % groups][place / groups] = a.sums[source(place / groups) * groups + place % groups];
}

template <int TILES>
__device__ __forceinline__ void up_rows(Shared& shared, const Experts& a, int expert, int first, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
  const int column_tile = blockIdx.x % (a.width / GROUP);
  // Tiles are padded with the last row.
  auto token = [&](int row) { return a.order[first + min(row, count - 1)] / a.top_k; };
  load_sums(shared, a, 8 * TILES, token);
  const uint4* weights[2];
  const u16* scales[2];
#pragma unroll
  for (int t = 0; t < 2; t++) {  // gate, up
    const size_t row = (size_t)expert * 2 * a.width + t * a.width + column_tile * GROUP + warp * 16 + quad;
    weights[t] = a.weight + row * (a.depth / 32) + c;
    scales[t] = a.scales + row * (a.depth / GROUP);
  }
  float total[2][TILES][4];
  multiply_rows<TILES>(
      shared, a.x, [&](int row) { return (u32)token(row) * a.depth; }, weights, scales, a.depth / GROUP, total);
  // Through shared memory into the order of the second GEMM's inputs.
  u16* tile = (u16*)shared.rows[0];
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float gate = rounded(total[0][n][i]), up = rounded(total[1][n][i]);
      const int column = warp * 16 + quad + i / 2 * 8;
      const int place = column % 32 / 8 * 32 + column / 32 * 8 + place_of(column % 8);
      tile[(n * 8 + 2 * c + i % 2) * GROUP + place] = to_bfloat16(rounded(gate / (1.f + __expf(-gate))) * up);
    }
  __syncthreads();
  for (int row = warp; row < count; row += WARPS) {
    const uint2 four = ((const uint2*)(tile + row * GROUP))[lane];
    float sum = to_float(four.x & 0xFFFF) + to_float(four.x >> 16) + to_float(four.y & 0xFFFF) + to_float(four.y >> 16);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    ((uint2*)(a.out + (size_t)(first + row) * a.width + column_tile * GROUP))[lane] = four;
    if (lane == 0) a.out_sums[(first + row) * (a.width / GROUP) + column_tile] = -136.f * sum;
  }
}

template <int TILES>
__device__ __forceinline__ void down_rows(Shared& shared, const Experts& a, int expert, int first, int count) {
  constexpr int COLUMNS = 2 * GROUP, STRIDE = COLUMNS + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, c = lane % 4;
  const int column_tile = blockIdx.x % (a.width / COLUMNS);
  auto sorted = [&](int row) { return first + min(row, count - 1); };
  load_sums(shared, a, 8 * TILES, sorted);
  const uint4* weights[2];
  const u16* scales[2];
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const size_t row = (size_t)expert * a.width + column_tile * COLUMNS + warp * 32 + t * 16 + quad;
    weights[t] = a.weight + row * (a.depth / 32) + c;
    scales[t] = a.scales + row * (a.depth / GROUP);
  }
  float total[2][TILES][4];
  multiply_rows<TILES>(
      shared, a.x, [&](int row) { return (u32)sorted(row) * a.depth; }, weights, scales, a.depth / GROUP, total);
  u16* tile = (u16*)shared.rows[0];
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        tile[(n * 8 + 2 * c + i % 2) * STRIDE + warp * 32 + t * 16 + quad + i / 2 * 8] = to_bfloat16(total[t][n][i]);
  __syncthreads();
  for (int row = warp; row < count; row += WARPS) {
    const uint4 eight = ((const uint4*)(tile + row * STRIDE))[lane];
    ((uint4*)(a.out + (size_t)a.order[first + row] * a.width + column_tile * COLUMNS))[lane] = eight;
  }
}

#define FOR_ROWS(function, columns)                                    \
  extern __shared__ __align__(128) unsigned char memory[];             \
  Shared& shared = *(Shared*)memory;                                   \
  const int block = blockIdx.x / (a.width / (columns));                \
  const int expert = a.table[block];                                   \
  if (expert < 0) return;                                              \
  const int first = a.table[a.table_width + block];                    \
  const int count = a.table[2 * a.table_width + block] - first;        \
  if (count <= 8) return function<1>(shared, a, expert, first, count); \
  return function<ROWS / 8>(shared, a, expert, first, count);

// Puts tokens into the order of the first GEMM's inputs. A thread has eight consecutive inputs, half a warp a group.
extern "C" __global__ void __launch_bounds__(THREADS) mingc_int4_arrange(const __grid_constant__ Tokens a) {
  const int piece = blockIdx.x * THREADS + threadIdx.x;
  if (piece >= a.pieces) return;  // whole warps: D is a multiple of 256
  const uint4 in = a.x[piece];
  const int c = piece % 16 / 4, w = piece % 4;
  a.out[piece / 16 * 16 + w * 4 + c] = {
      __byte_perm(in.x, in.z, 0x5410), __byte_perm(in.x, in.z, 0x7632), __byte_perm(in.y, in.w, 0x5410),
      __byte_perm(in.y, in.w, 0x7632)};
  float sum = 0.f;
#pragma unroll
  for (int word = 0; word < 4; word++) sum += to_float(word_of(in, word) & 0xFFFF) + to_float(word_of(in, word) >> 16);
#pragma unroll
  for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
  if (piece % 16 == 0) a.sums[piece / 16] = -136.f * sum;
}

// Grid of both GEMMs: outputs of one block of rows after the other. Two blocks fit into a multiprocessor's registers.
extern "C" __global__ void __launch_bounds__(THREADS, 2) mingc_int4_up(const __grid_constant__ Experts a) {
  FOR_ROWS(up_rows, GROUP)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) mingc_int4_down(const __grid_constant__ Experts a) {
  FOR_ROWS(down_rows, 2 * GROUP)
}
