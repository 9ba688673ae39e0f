"""The texts of the kernels of `few_rows.py`.

In a tensor core's product the left side is weights, (16 outputs, 16 inputs), and the right side rows, (16 inputs, 8
rows). The order of inputs is free as long as both sides agree: lane 4g + q has inputs 16q to 16q+15 of outputs g and
g+8 and of row g, and passes input p of eight together with input p+4, as they are in a word. A weight's code c is in
the low bits of the number BASE + c.

`sizes` are the rows, outputs, inputs, whether `more` is added, and where each part of the outputs ends. PART is the
array of a part, (rows, width). If GATED, the first half of the outputs are gates, and half of a group's tiles are the
outputs in the other half that belong to its gates.
"""

ROW_BYTES, TILE_BYTES = 144, 512
"""Of a row's 64 inputs in shared memory, and of a tile of weights."""

# Template: T, GS (weights a scale), NT (tiles of 8 rows), BIAS, GATED; and of a group of threads R (tiles of 16
# outputs), W (warps) and RUN.
#
# The warps share the inputs, a run of 64 * RUN at a time, of which a step multiplies 64. While a warp multiplies a run,
# it loads the next one, so that memory always has enough to do; a run's scales are loaded together. `sums`, which add
# up only the rows' inputs, are used to subtract BASE again, and for the weights' bias.
EACH_WARP_ITS_INPUTS = """
  constexpr int OWN = GATED ? R / 2 : R, OUTPUTS = 16 * OWN, WIDE = 16 * R + 4, SPLITS = W, THREADS = 32 * W;
  constexpr int SN = RUN * 64 / GS > 1 ? RUN * 64 / GS : 1;
  constexpr unsigned int ONES = ONE_BITS, HIGH = BASE_BITS, LOW = 0x000f000fu;
  // Weights are read once, a line of the cache by four loads in turn.
  #ifdef __CUDA_ARCH__
  #define READ_WORDS(to, from) \\
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(from))
  #else
  #define READ_WORDS(to, from) to = *(from)
  #endif
  union Scales {
    uint2 four; unsigned int two; unsigned short one;
    T x[4];
  };
  SHARED float sums_s[W * 8 * NT * WIDE];
  const int N = sizes[1], K = sizes[2], g = LANE >> 2, q = LANE & 3, split = WARP, side = 0;
  // Groups one after another have the same outputs, so weights are read from memory once.
  const int turns = (sizes[0] + 8 * NT - 1) / (8 * NT), begin_row = GROUP % turns * 8 * NT;
  const int M = sizes[0] - begin_row < 8 * NT ? sizes[0] - begin_row : 8 * NT;
  const int first = GROUP / turns * OUTPUTS, width = GATED ? N / 2 : N;
  // An array may begin anywhere within another.
  const bool aligned = ((unsigned long long)x & 15) == 0;
  const unsigned int wide = K / 16, groups = K / GS;
  uint2 ahead[RUN][R][2];
  uint4 rows[RUN][NT][2];
  Scales scales_now[R][2], biases_now[R][2], scales_next[R][2], biases_next[R][2];
  auto row_of = [&](int r, int h) {
    const int output = first + 16 * (r % OWN);
    return (unsigned int)((output < width ? output : 0) + r / OWN * width + 8 * h + g);
  };
  auto few = [&](Scales& to, const T* from) {
    if (SN == 4) to.four = *(const uint2*)from;
    else if (SN == 2) to.two = *(const unsigned int*)from;
    else to.one = *(const unsigned short*)from;
  };
  auto load_scales = [&](int run) {
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      const unsigned int at = row_of(r, h) * groups + (unsigned int)(run * RUN * 64) / GS;
      few(scales_next[r][h], scales + at);
      few(biases_next[r][h], biases + at);
    }
  };
  auto eight = [&](const T* from) {
    if (aligned) return *(const uint4*)from;
    const unsigned short* one = (const unsigned short*)from;
    return make_uint4(one[0] | one[1] << 16, one[2] | one[3] << 16, one[4] | one[5] << 16, one[6] | one[7] << 16);
  };
  auto load = [&](int run, int step) {
    const unsigned int k = (run * RUN + step) * 64;
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++)
      READ_WORDS(ahead[step][r][h], (const uint2*)words + row_of(r, h) * wide + k / 16 + q);
    #pragma unroll
    for (int n = 0; n < NT; n++) for (int h = 0; h < 2; h++) {
      const int row = 8 * n + g;
      const T* from = x + (unsigned int)((begin_row + row) * K + k + 16 * q + 8 * h);
      rows[step][n][h] = row < M ? eight(from) : make_uint4(0, 0, 0, 0);
    }
  };
  float total[R][NT][4];
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++) total[r][n][j] = 0.f;
  const int runs = K / (64 * RUN);
  if (WARP < runs) {
    load_scales(WARP);
    #pragma unroll
    for (int step = 0; step < RUN; step++) load(WARP, step);
  }
  for (int run = WARP; run < runs; run += W) {
    const bool more = run + W < runs;
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      scales_now[r][h] = scales_next[r][h];
      biases_now[r][h] = biases_next[r][h];
    }
    if (more) load_scales(run + W);
    #pragma unroll
    for (int step = 0; step < RUN; step++) {
      uint2 now[R][2];
      #pragma unroll
      for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) now[r][h] = ahead[step][r][h];
      unsigned int right[NT][8];
      #pragma unroll
      for (int n = 0; n < NT; n++) for (int h = 0; h < 2; h++) {
        const uint4 v = rows[step][n][h];
        right[n][4 * h] = __byte_perm(v.x, v.z, 0x5410);
        right[n][4 * h + 1] = __byte_perm(v.x, v.z, 0x7632);
        right[n][4 * h + 2] = __byte_perm(v.y, v.w, 0x5410);
        right[n][4 * h + 3] = __byte_perm(v.y, v.w, 0x7632);
      }
      if (more) load(run + W, step);
      float sums[NT][4];
      #pragma unroll
      for (int n = 0; n < NT; n++) {
        for (int j = 0; j < 4; j++) sums[n][j] = 0.f;
        #pragma unroll
        for (int i = 0; i < 4; i++) MULTIPLY(sums[n], ONES, ONES, ONES, ONES, right[n][2 * i], right[n][2 * i + 1]);
      }
      #pragma unroll
      for (int r = 0; r < R; r++) {
        unsigned int left[4][4];
        #pragma unroll
        for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) {
          const uint2 pair = now[r][j & 1];
          left[i][j] = (((i < 2 ? pair.x : pair.y) >> (8 * (i & 1) + 4 * (j >> 1))) & LOW) | HIGH;
        }
        float scale[2], bias[2];
        for (int h = 0; h < 2; h++) {
          scale[h] = static_cast<float>(scales_now[r][h].x[step * 64 / GS]);
          bias[h] = static_cast<float>(biases_now[r][h].x[step * 64 / GS]) - BASE * scale[h];
        }
        #pragma unroll
        for (int n = 0; n < NT; n++) {
          float part[4] = {0.f, 0.f, 0.f, 0.f};
          #pragma unroll
          for (int i = 0; i < 4; i++)
            MULTIPLY(part, left[i][0], left[i][1], left[i][2], left[i][3], right[n][2 * i], right[n][2 * i + 1]);
          for (int j = 0; j < 4; j++) total[r][n][j] += scale[j >> 1] * part[j] + bias[j >> 1] * sums[n][j & 1];
        }
      }
    }
  }
"""

# Template: as above, but R tiles of outputs for each of WN warps side by side, WK divisions of the inputs, and STAGES.
#
# Each division has a ring of stages in shared memory, of 64 inputs each, which are copied while others are multiplied:
# of the rows, and of the weights of its warps. Rows in shared memory have 16 bytes more than they need, so that what a
# quarter of a warp reads lies in different banks. Weights are dequantized in pairs before they are multiplied: with
# many rows that takes less than to scale products.
SHARED_ROWS = """
  constexpr int TILES = WN * R, OWN = GATED ? TILES / 2 : TILES, OUTPUTS = 16 * OWN, WIDE = 16 * TILES + 4;
  constexpr int SPLITS = WK, THREADS = 32 * WN * WK;
  constexpr int ROW_BYTES = 144, ROWS = 8 * NT, STAGE = ROWS * ROW_BYTES + TILES * 512, SIDE = 32 * WN;
  constexpr unsigned int HIGH = BASE_BITS, LOW = 0x000f000fu, ONES = ONE_BITS, LESS = MINUS_BITS;
  #ifdef __CUDA_ARCH__
  extern __shared__ uint4 memory_s[];
  typedef unsigned int Place;
  #define PLACE_OF(pointer) (unsigned int)__cvta_generic_to_shared(pointer)
  #define COPY(place, from, bytes) \\
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(place), "l"(from), "r"(bytes))
  #define COPIED() asm volatile("cp.async.commit_group;")
  #define WAIT_FOR_COPIES(left) asm volatile("cp.async.wait_group %0;" : : "n"(left) : "memory")
  #define FUSE(to, a, b, c) asm("fma.rn.KINDx2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c))
  #else
  static uint4 memory_s[WK * STAGES * STAGE / 16 + WK * ROWS * WIDE / 4];
  typedef unsigned long long Place;
  #define PLACE_OF(pointer) (Place)(pointer)
  #define COPY(place, from, bytes) if (bytes) memcpy((void*)(place), from, 16); else memset((void*)(place), 0, 16)
  #define COPIED()
  #define WAIT_FOR_COPIES(left)
  #define FUSE(to, a, b, c) { \\
    const unsigned int a_ = a, b_ = b, c_ = c; \\
    T x_[2], y_[2], z_[2]; \\
    memcpy(x_, &a_, 4); memcpy(y_, &b_, 4); memcpy(z_, &c_, 4); \\
    for (int i_ = 0; i_ < 2; i_++) \\
      x_[i_] = static_cast<T>(static_cast<float>(x_[i_]) * static_cast<float>(y_[i_]) + static_cast<float>(z_[i_])); \\
    memcpy(&to, x_, 4); }
  #endif
  const int N = sizes[1], K = sizes[2], g = LANE >> 2, q = LANE & 3, split = WARP / WN, side = WARP % WN;
  const int turns = (sizes[0] + ROWS - 1) / ROWS, begin_row = GROUP % turns * ROWS;
  const int M = sizes[0] - begin_row < ROWS ? sizes[0] - begin_row : ROWS;
  const int first = GROUP / turns * OUTPUTS, width = GATED ? N / 2 : N;
  const bool aligned = ((unsigned long long)x & 15) == 0;
  const unsigned int groups = K / GS;
  const int steps = K / 64, mine = (steps + WK - 1) / WK, from_step = split * mine;
  const int end_step = from_step + mine < steps ? from_step + mine : steps;
  const Place stages = PLACE_OF(memory_s) + split * STAGES * STAGE;
  char* stages_s = (char*)memory_s + split * STAGES * STAGE;
  auto row_of = [&](int tile, int row) {
    const int output = first + 16 * (tile % OWN);
    return (unsigned int)((output < width ? output : 0) + tile / OWN * width + row);
  };
  auto fetch = [&](int i) {
    const int step = from_step + i, to = i % STAGES * STAGE, t = THREAD % SIDE;
    if (step >= end_step) return;
    #pragma unroll
    for (int piece = t; piece < 8 * ROWS; piece += SIDE) {
      const int row = piece / 8, at = to + row * ROW_BYTES + piece % 8 * 16;
      const T* from = x + (unsigned int)((begin_row + (row < M ? row : 0)) * K + step * 64 + piece % 8 * 8);
      if (aligned) {
        COPY(stages + at, from, row < M ? 16 : 0);
      } else {
        unsigned short* to_s = (unsigned short*)(stages_s + at);
        for (int j = 0; j < 8; j++) to_s[j] = row < M ? ((const unsigned short*)from)[j] : 0;
      }
    }
    #pragma unroll
    for (int piece = t; piece < 32 * TILES; piece += SIDE) {
      const int tile = piece / 32, row = piece / 2 % 16;
      COPY(stages + to + ROWS * ROW_BYTES + piece * 16,
           words + row_of(tile, row) * (unsigned int)(K / 8) + step * 8 + piece % 2 * 4, 16);
    }
  };
  unsigned int scale_of[R][2], bias_now[R][2];
  auto load_scales = [&](int step) {
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      const unsigned int at = row_of(side * R + r, 8 * h + g) * groups + (unsigned int)(step * 64) / GS;
      scale_of[r][h] = ((const unsigned short*)scales)[at] * 0x10001u;
      bias_now[r][h] = ((const unsigned short*)biases)[at] * 0x10001u;
    }
  };
  float total[R][NT][4];
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++) total[r][n][j] = 0.f;
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) { fetch(i); COPIED(); }
  if (from_step < end_step) load_scales(from_step);
  for (int i = 0; i < mine; i++) {
    WAIT_FOR_COPIES(STAGES - 2);
    SYNC();
    fetch(i + STAGES - 1);
    COPIED();
    if (from_step + i >= end_step) continue;
    const char* stage = stages_s + i % STAGES * STAGE;
    unsigned int left[R][4][4];
    #pragma unroll
    for (int r = 0; r < R; r++) for (int h = 0; h < 2; h++) {
      const uint2 pair = *(const uint2*)(stage + ROWS * ROW_BYTES + ((side * R + r) * 16 + 8 * h + g) * 32 + q * 8);
      #pragma unroll
      for (int i = 0; i < 4; i++) for (int j = 0; j < 2; j++) {
        const unsigned int code = (((i < 2 ? pair.x : pair.y) >> (8 * (i & 1) + 4 * j)) & LOW) | HIGH;
        unsigned int number;
        FUSE(number, code, ONES, LESS);
        FUSE(left[r][i][2 * j + h], number, scale_of[r][h], bias_now[r][h]);
      }
    }
    if (from_step + i + 1 < end_step) load_scales(from_step + i + 1);
    #pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4* row = (const uint4*)(stage + (8 * n + g) * ROW_BYTES + 32 * q);
      unsigned int right[8];
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 v = row[h];
        right[4 * h] = __byte_perm(v.x, v.z, 0x5410);
        right[4 * h + 1] = __byte_perm(v.x, v.z, 0x7632);
        right[4 * h + 2] = __byte_perm(v.y, v.w, 0x5410);
        right[4 * h + 3] = __byte_perm(v.y, v.w, 0x7632);
      }
      #pragma unroll
      for (int r = 0; r < R; r++) for (int i = 0; i < 4; i++) {
        const unsigned int* a = left[r][i];
        MULTIPLY(total[r][n], a[0], a[1], a[2], a[3], right[2 * i], right[2 * i + 1]);
      }
    }
  }
  WAIT_FOR_COPIES(0);
  SYNC();
  float* sums_s = (float*)memory_s;
"""

# The sums of the divisions are added up in their order, so a product has the same bits every time.
FINISH = """  auto rounded = [](float number) { return static_cast<float>(static_cast<T>(number)); };
  #pragma unroll
  for (int r = 0; r < R; r++) for (int n = 0; n < NT; n++) for (int j = 0; j < 4; j++)
    sums_s[(split * 8 * NT + 8 * n + 2 * q + (j & 1)) * WIDE + 16 * (side * R + r) + 8 * (j >> 1) + g] = total[r][n][j];
  SYNC();
  for (int i = THREAD; i < OUTPUTS * M; i += THREADS) {
    const int m = i / OUTPUTS, n = i % OUTPUTS, output = first + n;
    if (output >= width) continue;
    auto product = [&](int half) {
      float sum = 0.f;
      for (int w = 0; w < SPLITS; w++) sum += sums_s[(w * 8 * NT + m) * WIDE + half * OUTPUTS + n];
      if (BIAS) sum += static_cast<float>(bias_of[half * width + output]);
      return rounded(sum);
    };
    float y = product(0);
    if (GATED) {
      const float part = rounded(1.f / rounded(1.f + rounded(EXP(ABS(y)))));
      y = rounded(rounded(y * (y < 0.f ? part : rounded(1.f - part))) * product(1));
    }
    if (sizes[3]) y += static_cast<float>(more[(begin_row + m) * N + output]);
    int begin = 0, part = 0;
    while (output >= sizes[4 + part]) begin = sizes[4 + part++];
    (PART)[(long)(begin_row + m) * (sizes[4 + part] - begin) + output - begin] = static_cast<T>(y);
  }
"""
