// Rotation and attention of a packed projection with heads of 72 dims: every query sees one range of keys, not empty.
//
// `mingc_rotate` writes rotated queries, and keys and values as chunks: 8 dims of all keys of a head, contiguous, so that
// bulk copies of whole lines fill shared memory in a layout that the matrix instructions read without a swizzle.
// `mingc_attend` is in the style of FlashAttention 3 (arXiv 2407.08608): a warpgroup loads tiles of KEYS keys into a ring,
// GROUPS warpgroups of 64 queries each multiply. A warpgroup computes the scores of the next tile and the context of the
// current one in its turn, and the softmax while others multiply; named barriers pass on the turn. Queries, scores and
// weights stay in registers. 72 dims are padded to 80: queries are zero there, and keys and values share a tenth chunk of
// ones, whose context is the sum of the weights.
// rotary_varlen_attention.py launches the kernels and fills their structs.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int HEADS = 16, HEAD = 72, CHUNKS = HEAD / 8, PADDED = HEAD + 8;
constexpr int ROWS = 32;  // of a block of mingc_rotate
constexpr float SCALE = 0.17002324f;  // log2(e) / sqrt(72): a weight is a power of two
constexpr float SLACK = 8.f;  // weights up to 2^8 before sums are rescaled to a new maximum
#define INFINITE __int_as_float(0x7F800000)

struct Rotation {
  const u16* qkv;  // (rows, 3, heads, 72)
  const float* cos;  // (rows, 36)
  const float* sin;
  u16* q;       // (rows, heads, 72)
  u16* chunks;  // keys, then values: (2, heads, 9, padded, 8)
  int rows;
  int padded;  // rows, and zeros up to the end of the last tile
};

struct Attention {
  const u16* q;
  const u16* chunks;
  const int* bounds;  // start and end of the keys that a query sees
  u16* out;           // (rows, heads, 72)
  int rows;
  int padded;
  int bounds_step;  // 0: one range for all queries
  int blocks;  // of a head
};

#define DEVICE __device__ __forceinline__

DEVICE u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
DEVICE float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE u32 memory_base() {
  extern __shared__ char memory[];
  return ((u32)__cvta_generic_to_shared(memory) + 127) & ~127u;
}
DEVICE void store_shared(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
// Before the matrix instructions or bulk copies use what plain stores wrote.
DEVICE void show_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers in shared memory.
DEVICE void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
DEVICE void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Turns of two warpgroups: one waits, the one before it gives.
DEVICE void wait_turn(int turn) { asm volatile("bar.sync %0, 256;" ::"r"(turn) : "memory"); }
DEVICE void give_turn(int turn) { asm volatile("bar.arrive %0, 256;" ::"r"(turn) : "memory"); }

// Matrix instructions. An operand in shared memory is not swizzled: blocks of eight times 16 bytes, with distances along
// the dimension that is summed and across it.
DEVICE u64 descriptor(u32 address, u32 along, u32 across) {
  return ((u64)(across >> 4) << 32) | ((u64)(along >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}
DEVICE void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups multiply. The empty statements keep the compiler from reading the sums earlier.
template <int N, int SIZE>
DEVICE void wait_multiply(float (&d)[SIZE]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
  for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
#define SUM(i) "+f"(d[i])
#define SUMS(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3), SUM(i + 4), SUM(i + 5), SUM(i + 6), SUM(i + 7)
#define FIRST_40                                                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
// 96 scores: d = q k, or d += q k.
DEVICE void multiply(float (&d)[48], const u32* q, u64 k, int adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %53, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" FIRST_40
      ",%40,%41,%42,%43,%44,%45,%46,%47}, {%48,%49,%50,%51}, %52, adds, 1, 1, 0;\n}"
      : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40)
      : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "r"(adds));
}
// 80 dims of the context: d += weights v.
DEVICE void multiply(float (&d)[40], const u32* weights, u64 v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" FIRST_40
               "}, {%40,%41,%42,%43}, %44, 1, 1, 1, 1;"
               : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(v));
}

// Below: plain C++ on top of the instructions above.

// A pair of dims, with its partner: low dims subtract the sine (negative `sin`), high ones add it.
DEVICE u32 turned(u32 x, u32 partner, float2 cos, float2 sin) {
  const float low = __uint_as_float(x << 16) * cos.x + __uint_as_float(partner << 16) * sin.x;
  const float high = __uint_as_float(x & 0xFFFF0000) * cos.y + __uint_as_float(partner & 0xFFFF0000) * sin.y;
  return pack(low, high);
}

// Six blocks (`_PARTS`) for 32 rows: queries, keys and values, half of the heads each.
extern "C" __global__ void __launch_bounds__(256) mingc_rotate(const __grid_constant__ Rotation p) {
  constexpr int PAIRS = HEAD / 4;  // pairs of angles
  constexpr int WIDTH = HEADS * CHUNKS, PIECES = WIDTH / 2;  // of 8 dims: in a row, in a block
  __shared__ uint4 tile[ROWS][PIECES + 1];
  __shared__ float2 cos[ROWS][PAIRS], sin[ROWS][PAIRS];
  const int part = blockIdx.x % 6 / 2, half = blockIdx.x % 2, row = blockIdx.x / 6 * ROWS;
  const uint4* from = (const uint4*)p.qkv + ((long long)row * 3 + part) * WIDTH + half * PIECES;
  for (int i = threadIdx.x; i < ROWS * PIECES; i += 256) {
    const int r = i / PIECES, c = i % PIECES;
    tile[r][c] = row + r < p.rows ? from[r * 3 * WIDTH + c] : make_uint4(0, 0, 0, 0);
  }
  if (part < 2)
    for (int i = threadIdx.x; i < ROWS * PAIRS; i += 256) {
      const bool exists = row + i / PAIRS < p.rows;
      const long long place = (long long)row * PAIRS + i;
      (&cos[0][0])[i] = exists ? ((const float2*)p.cos)[place] : make_float2(0, 0);
      (&sin[0][0])[i] = exists ? ((const float2*)p.sin)[place] : make_float2(0, 0);
    }
  __syncthreads();
  auto piece_of = [&](int r, int c) {
    uint4 piece = tile[r][c];
    if (part == 2) return piece;
    const uint2* head = (const uint2*)&tile[r][c / CHUNKS * CHUNKS];
    u32* words = (u32*)&piece;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int four = c % CHUNKS * 2 + i;  // dims of the head
      const bool is_low = four < PAIRS / 2;
      const int angle = is_low ? four : four - PAIRS / 2;
      const uint2 partner = head[is_low ? four + PAIRS / 2 : angle];
      const float sign = is_low ? -1.f : 1.f;
      const float2 a = sin[r][2 * angle], b = sin[r][2 * angle + 1];
      words[2 * i] = turned(words[2 * i], partner.x, cos[r][2 * angle], make_float2(sign * a.x, sign * a.y));
      words[2 * i + 1] =
          turned(words[2 * i + 1], partner.y, cos[r][2 * angle + 1], make_float2(sign * b.x, sign * b.y));
    }
    return piece;
  };
  if (part == 0) {
    uint4* to = (uint4*)p.q + (long long)row * WIDTH + half * PIECES;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += 256) {
      const int r = i / PIECES, c = i % PIECES;
      if (row + r < p.rows) to[r * WIDTH + c] = piece_of(r, c);
    }
  } else {
    uint4* to = (uint4*)p.chunks + (long long)((part - 1) * WIDTH + half * PIECES) * p.padded + row;
    for (int i = threadIdx.x; i < ROWS * PIECES; i += 256)
      to[(long long)(i / ROWS) * p.padded + i % ROWS] = piece_of(i % ROWS, i / ROWS);
  }
}

// A stage of the ring: nine chunks of keys, nine of values, one of ones.
constexpr int CHUNK = KEYS * 16, VALUES = CHUNKS * CHUNK, ONES = 2 * VALUES, STAGE = ONES + CHUNK;
// Barriers of each stage: its keys or values have arrived; all warps have multiplied them.
constexpr int HAS_KEYS = STAGES * STAGE, HAS_VALUES = HAS_KEYS + 8 * STAGES, FREE_KEYS = HAS_VALUES + 8 * STAGES,
              FREE_VALUES = FREE_KEYS + 8 * STAGES;

DEVICE void score(float (&scores)[KEYS / 2], const u32 (&q)[PADDED / 4], u32 keys) {
#pragma unroll
  for (int i = 0; i < PADDED / 16; ++i) {
    const u32 chunk = keys + 2 * i * CHUNK;
    multiply(scores, q + 4 * i, descriptor(chunk, 2 * i + 1 < CHUNKS ? CHUNK : keys + ONES - chunk, 128), i > 0);
  }
}
DEVICE void add_values(float (&context)[PADDED / 2], const u32 (&weights)[KEYS / 4], u32 values) {
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) multiply(context, weights + 4 * i, descriptor(values + 256 * i, 128, CHUNK));
}

// Softmax of a thread's two queries. Accumulator [4 j + 2 r + e] has query r, column 8 j + 2 (lane % 4) + e.
struct Softmax {
  float top[2], shrink[2];  // maximum of the scaled scores (up to SLACK below), factor of the sums so far
  int start[2], end[2];     // keys that the query sees

  DEVICE void read_bounds(const Attention& p, int row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int* place = p.bounds + min(row + 8 * r, p.rows - 1) * p.bounds_step;
      start[r] = place[0], end[r] = place[1];
      top[r] = -INFINITE;
    }
  }
  // Scores to weights, for a tile that starts at `key`.
  DEVICE void weigh(float (&scores)[KEYS / 2], int key) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int column = key + threadIdx.x % 4 * 2;
      if (key < start[r] || key + KEYS > end[r])
#pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) {
          const int there = column + i / 2 * 8 + i % 2;
          if (there < start[r] || there >= end[r]) scores[i / 2 * 4 + 2 * r + i % 2] = -INFINITE;
        }
      float most[2] = {-INFINITE, -INFINITE};
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], scores[i / 2 * 4 + 2 * r + i % 2]);
      float highest = fmaxf(most[0], most[1]);
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 2)) * SCALE;
      const float before = top[r];
      if (highest > before + SLACK) top[r] = highest;
      // A query that has seen no key yet has its maximum at -inf, which cannot be subtracted.
      const float reference = top[r] == -INFINITE ? 0.f : top[r];
      shrink[r] = power(before - reference);
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * r + i % 2];
        score = power(fmaf(score, SCALE, -reference));
      }
    }
  }
  DEVICE void rescale(float (&context)[PADDED / 2]) const {
    if (!__any_sync(0xFFFFFFFFu, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < PADDED / 2; ++i) context[i] *= shrink[i / 2 % 2];
  }
};
DEVICE void round_weights(const float (&scores)[KEYS / 2], u32 (&weights)[KEYS / 4]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// Fills the ring: warp 0 with keys, warp 1 with values; a lane copies a chunk of each tile.
DEVICE void load(const Attention& p, u32 base, int head, int first, int tiles) {
  const int chunk = threadIdx.x % 32, is_value = threadIdx.x / 32;
  const u16* from = p.chunks + (((long long)(is_value * HEADS + head) * CHUNKS + chunk) * p.padded + first) * 8;
  const u32 to = base + (is_value ? VALUES : 0) + chunk * CHUNK;
  const u32 has = base + (is_value ? HAS_VALUES : HAS_KEYS), free = base + (is_value ? FREE_VALUES : FREE_KEYS);
  for (int i = 0; i < tiles; ++i) {
    const int stage = i % STAGES;
    if (i >= STAGES) wait(free + 8 * stage, (i / STAGES + 1) & 1);
    if (chunk == 0) expect_bytes(has + 8 * stage, CHUNKS * CHUNK);
    __syncwarp();
    if (chunk < CHUNKS) copy(to + stage * STAGE, from + (long long)i * KEYS * 8, CHUNK, has + 8 * stage);
  }
}

// 64 queries of a head, of which `row` and row + 8 are those of this thread.
DEVICE void attend(const Attention& p, Softmax& softmax, u32 base, int head, int row, int group, int first, int tiles) {
  const bool leads = threadIdx.x % 32 == 0;
  const int turn = 1 + group, next_turn = 1 + ((group + 1) % GROUPS);
  const long long step = HEADS * HEAD, place = row * step + head * HEAD + threadIdx.x % 4 * 2;
  float context[PADDED / 2], scores[KEYS / 2];
  u32 weights[KEYS / 4], q[PADDED / 4];
#pragma unroll
  for (int i = 0; i < PADDED / 2; ++i) context[i] = 0.f;
#pragma unroll
  for (int i = 0; i < PADDED / 4; ++i)
    q[i] = i / 2 < CHUNKS && row + i % 2 * 8 < p.rows ? *(const u32*)(p.q + place + i % 2 * 8 * step + i / 2 * 8) : 0;
  if (group == GROUPS - 1) give_turn(next_turn);
  wait(base + HAS_KEYS, 0);
  begin_multiply();
  score(scores, q, base);
  end_multiply();
  wait_multiply<0>(scores);
  if (leads) arrive(base + FREE_KEYS);
  softmax.weigh(scores, first);
  round_weights(scores, weights);
  int stage = 0;
  u32 parity = 0;
  for (int i = 1; i < tiles; ++i) {
    const int before = stage;
    const u32 before_parity = parity;
    if (++stage == STAGES) stage = 0, parity ^= 1;
    wait(base + HAS_KEYS + 8 * stage, parity);
    wait_turn(turn);
    begin_multiply();
    score(scores, q, base + stage * STAGE);
    end_multiply();
    wait(base + HAS_VALUES + 8 * before, before_parity);
    add_values(context, weights, base + before * STAGE + VALUES);
    end_multiply();
    give_turn(next_turn);
    wait_multiply<1>(scores);
    if (leads) arrive(base + FREE_KEYS + 8 * stage);
    softmax.weigh(scores, first + i * KEYS);
    wait_multiply<0>(context);
    if (leads) arrive(base + FREE_VALUES + 8 * before);
    softmax.rescale(context);
    round_weights(scores, weights);
  }
  wait(base + HAS_VALUES + 8 * stage, parity);
  begin_multiply();
  add_values(context, weights, base + stage * STAGE + VALUES);
  end_multiply();
  wait_multiply<0>(context);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = 1.f / context[4 * CHUNKS + 2 * r];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
      if (row + 8 * r < p.rows)
        *(u32*)(p.out + place + 8 * r * step + 8 * j) =
            pack(context[4 * j + 2 * r] * factor, context[4 * j + 2 * r + 1] * factor);
  }
}

extern "C" __global__ void __launch_bounds__(128 + GROUPS * 128, 1) mingc_attend(const __grid_constant__ Attention p) {
  __shared__ int ends[2];
  const u32 base = memory_base();
  const int group = threadIdx.x / 128 - 1;  // -1 loads
  const int head = blockIdx.x / p.blocks;
  const int row = (blockIdx.x % p.blocks * GROUPS + group) * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  if (threadIdx.x == 0) {
    ends[0] = p.rows, ends[1] = 0;
    for (int s = 0; s < STAGES; ++s) {
      make_barrier(base + HAS_KEYS + 8 * s, 1), make_barrier(base + HAS_VALUES + 8 * s, 1);
      make_barrier(base + FREE_KEYS + 8 * s, 4 * GROUPS), make_barrier(base + FREE_VALUES + 8 * s, 4 * GROUPS);
    }
    show_barriers();
  }
  for (int i = threadIdx.x; i < STAGES * CHUNK / 4; i += blockDim.x)
    store_shared(base + i / (CHUNK / 4) * STAGE + ONES + i % (CHUNK / 4) * 4, 0x3F803F80);  // ones in bfloat16
  show_stores();
  __syncthreads();
  Softmax softmax;
  if (group >= 0) {
    softmax.read_bounds(p, row);
    const int start = __reduce_min_sync(0xFFFFFFFFu, min(softmax.start[0], softmax.start[1]));
    const int end = __reduce_max_sync(0xFFFFFFFFu, max(softmax.end[0], softmax.end[1]));
    if (threadIdx.x % 32 == 0) atomicMin(&ends[0], start), atomicMax(&ends[1], end);
  }
  __syncthreads();
  // Tiles from the smallest start to the largest end of the block.
  const int first = ends[0], tiles = (ends[1] - first + KEYS - 1) / KEYS;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 64) load(p, base, head, first, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 240 : 160));
    attend(p, softmax, base, head, row, group, first, tiles);
  }
}
