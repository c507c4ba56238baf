// BlockAttention in two kernels that run one after the other: new rows to the caches, then the attention of the block.
//
// Keys are taken in tiles that begin at fixed multiples, counted from the first row of the cache, each in a fixed order:
// what a query gets does not depend on the batch, on padding or on the size of the buffers.
//
// Values that are out of their limits can't be reported from here: such a sequence writes nothing, and its output is NaN.

constexpr int ATTENTION_WARPS = 4;
constexpr int MOST_HEAD_DIM = 256;
constexpr int PARTS = MOST_HEAD_DIM / WARP;

// Where the rows of one sequence are.
struct Place {
    i64 start, context, block;
    bool is_valid;
};

__device__ Place place_of(
    i64 batch, const i64* context_start, const i64* context_rows, const i64* block_rows, i64 most_context, i64 most_block,
    i64 capacity
) {
    Place place = {context_start[batch], context_rows[batch], block_rows[batch], true};
    place.is_valid = place.context >= 0 && place.context <= most_context && place.block >= 0 && place.block <= most_block
        && place.start >= 0 && place.start <= capacity - place.context - place.block;
    return place;
}

// Whether all positions of the rows that are not padding have a row in the rotary tables.
__device__ bool positions_are_valid(const i64* position_ids, i64 rows, i64 positions, i64 half) {
    bool is_bad = false;
    for (i64 row = threadIdx.x % WARP; row < rows && half > 0; row += WARP) {
        is_bad |= position_ids[row] < 0 || position_ids[row] >= positions;
    }
    return !warp_any(is_bad);
}

// One warp: a head after norm and rotation, times `scale`, to `prepared` in shared memory.
template <typename T>
__device__ void prepare_head(
    const T* head, i64 head_dim, const float* norm, float epsilon, const float* cos, const float* sin, i64 half,
    bool is_interleaved, float scale, float* prepared
) {
    int lane = threadIdx.x % WARP;
    float square = 0.0f;
    for (i64 i = lane; i < head_dim; i += WARP) {
        float x = wide(head[i]);
        square += x * x;
    }
    float factor = norm ? 1.0f / sqrtf(warp_sum(square) / float(head_dim) + epsilon) : 1.0f;
    for (i64 i = lane; i < head_dim; i += WARP) {
        float x = wide(head[i]);
        prepared[i] = norm ? x * factor * norm[i] : x;
    }
    __syncwarp();
    for (i64 i = lane; i < half; i += WARP) {
        i64 first = is_interleaved ? 2 * i : i, second = is_interleaved ? 2 * i + 1 : i + half;
        float a = prepared[first], b = prepared[second];
        prepared[first] = a * cos[i] - b * sin[i];
        prepared[second] = b * cos[i] + a * sin[i];
    }
    __syncwarp();
    for (i64 i = lane; i < head_dim; i += WARP) {
        prepared[i] *= scale;
    }
    __syncwarp();
}

// Grid: one warp for each kv head of each context and block row of the batch.
template <typename T>
__device__ void append(
    const T* key, const T* value, const T* context_key, const T* context_value, T* key_cache, T* value_cache,
    const i64* block_position_ids, const i64* context_position_ids, const i64* context_start, const i64* context_rows,
    const i64* block_rows, const float* cos, const float* sin, const float* norm, i64 batches, i64 most_block,
    i64 most_context, i64 capacity, i64 kv_heads, i64 head_dim, i64 half, i64 positions, i64 is_interleaved, i64 epsilon
) {
    DYNAMIC_SHARED(memory);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* prepared = reinterpret_cast<float*>(memory) + warp * head_dim;
    i64 work = i64(blockIdx.x) * ATTENTION_WARPS + warp;
    i64 head = work % kv_heads, row = work / kv_heads % (most_context + most_block);
    i64 batch = work / kv_heads / (most_context + most_block);
    if (batch >= batches) {
        return;
    }
    Place place = place_of(batch, context_start, context_rows, block_rows, most_context, most_block, capacity);
    context_position_ids += batch * most_context;
    block_position_ids += batch * most_block;
    if (!place.is_valid || !positions_are_valid(context_position_ids, place.context, positions, half)
        || !positions_are_valid(block_position_ids, place.block, positions, half)) {
        return;
    }
    bool is_context = row < most_context;
    i64 index = is_context ? row : row - most_context;
    if (index >= (is_context ? place.context : place.block)) {
        return;
    }
    i64 from = (batch * (is_context ? most_context : most_block) + index) * kv_heads + head;
    i64 cache_row = batch * capacity + place.start + (is_context ? index : place.context + index);
    i64 to = (cache_row * kv_heads + head) * head_dim;
    i64 angle = half > 0 ? (is_context ? context_position_ids : block_position_ids)[index] * half : 0;
    prepare_head(
        (is_context ? context_key : key) + from * head_dim, head_dim, norm, __uint_as_float(u32(epsilon)), cos + angle,
        sin + angle, half, is_interleaved != 0, 1.0f, prepared
    );
    for (i64 i = lane; i < head_dim; i += WARP) {
        key_cache[to + i] = narrow<T>(prepared[i]);
        value_cache[to + i] = (is_context ? context_value : value)[from * head_dim + i];
    }
}

// Grid: one warp for each head of each block row of the batch.
template <typename T>
__device__ void attend(
    const T* query, const T* key_cache, const T* value_cache, T* output, const i64* block_position_ids,
    const i64* context_position_ids, const i64* context_start, const i64* context_rows, const i64* block_rows,
    const float* cos, const float* sin, const float* norm, i64 batches, i64 most_block, i64 most_context, i64 capacity,
    i64 heads, i64 kv_heads, i64 head_dim, i64 half, i64 positions, i64 is_interleaved, i64 epsilon, i64 scale,
    i64 softcap_bits, i64 is_causal, i64 window
) {
    DYNAMIC_SHARED(memory);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* prepared = reinterpret_cast<float*>(memory) + warp * head_dim;
    i64 work = i64(blockIdx.x) * ATTENTION_WARPS + warp;
    i64 head = work % heads, row = work / heads % most_block, batch = work / heads / most_block;
    if (batch >= batches) {
        return;
    }
    Place place = place_of(batch, context_start, context_rows, block_rows, most_context, most_block, capacity);
    context_position_ids += batch * most_context;
    block_position_ids += batch * most_block;
    i64 from = ((batch * most_block + row) * heads + head) * head_dim;
    bool is_valid = place.is_valid && positions_are_valid(context_position_ids, place.context, positions, half)
        && positions_are_valid(block_position_ids, place.block, positions, half);
    if (!is_valid || row >= place.block) {
        for (i64 i = lane; i < head_dim; i += WARP) {
            output[from + i] = narrow<T>(is_valid ? 0.0f : not_a_number());
        }
        return;
    }
    i64 angle = half > 0 ? block_position_ids[row] * half : 0;
    prepare_head(
        query + from, head_dim, norm, __uint_as_float(u32(epsilon)), cos + angle, sin + angle, half,
        is_interleaved != 0, __uint_as_float(u32(scale)), prepared
    );

    i64 here = place.start + place.context + row, first = 0, end = place.start + place.context + place.block;
    if (is_causal) {
        end = here + 1 < end ? here + 1 : end;
    }
    if (window > 0) {
        first = here - window + 1 > 0 ? here - window + 1 : 0;
        end = here + window < end ? here + window : end;
    }
    i64 kv_head = head / (heads / kv_heads), stride = kv_heads * head_dim;
    const T* keys = key_cache + batch * capacity * stride + kv_head * head_dim;
    const T* values = value_cache + batch * capacity * stride + kv_head * head_dim;
    float softcap = __uint_as_float(u32(softcap_bits));
    float largest = -infinity(), sum = 0.0f, gathered[PARTS];
    for (int part = 0; part < PARTS; part++) {
        gathered[part] = 0.0f;
    }
    for (i64 tile = first / WARP * WARP; tile < end; tile += WARP) {
        // Each lane has a key; the values are added key by key, each lane its elements.
        i64 key = tile + lane;
        float score = -infinity();
        if (key >= first && key < end) {
            score = 0.0f;
            for (i64 i = 0; i < head_dim; i++) {
                score += prepared[i] * wide(keys[key * stride + i]);
            }
            if (softcap > 0.0f) {
                score = softcap * tanhf(score / softcap);
            }
        }
        // A score that is NaN makes the row NaN, as it should.
        float new_largest = warp_max(score);
        new_largest = new_largest > largest ? new_largest : largest;
        float weight = expf(score - new_largest), factor = expf(largest - new_largest);
        sum = sum * factor + warp_sum(weight);
        largest = new_largest;
        for (int part = 0; part < PARTS; part++) {
            gathered[part] *= factor;
        }
        for (int other = 0; other < WARP; other++) {
            float other_weight = __shfl_sync(ALL_LANES, weight, other);
            i64 row_of_other = tile + other;
            if (row_of_other < first || row_of_other >= end) {
                continue;
            }
            for (int part = 0; part < PARTS; part++) {
                i64 i = part * WARP + lane;
                if (i < head_dim) {
                    gathered[part] += other_weight * wide(values[row_of_other * stride + i]);
                }
            }
        }
    }
    for (int part = 0; part < PARTS; part++) {
        i64 i = part * WARP + lane;
        if (i < head_dim) {
            output[from + i] = narrow<T>(gathered[part] / sum);
        }
    }
}

#define BLOCK_ATTENTION(T, SUFFIX)                                                                                   \
    extern "C" __global__ void block_attention_append_##SUFFIX(                                                      \
        const T* key, const T* value, const T* context_key, const T* context_value, T* key_cache, T* value_cache,    \
        const i64* block_position_ids, const i64* context_position_ids, const i64* context_start,                    \
        const i64* context_rows, const i64* block_rows, const float* cos, const float* sin, const float* norm,       \
        i64 batches, i64 most_block, i64 most_context, i64 capacity, i64 kv_heads, i64 head_dim, i64 half,           \
        i64 positions, i64 is_interleaved, i64 epsilon                                                               \
    ) {                                                                                                              \
        append(                                                                                                      \
            key, value, context_key, context_value, key_cache, value_cache, block_position_ids,                      \
            context_position_ids, context_start, context_rows, block_rows, cos, sin, norm, batches, most_block,      \
            most_context, capacity, kv_heads, head_dim, half, positions, is_interleaved, epsilon                     \
        );                                                                                                           \
    }                                                                                                                \
    extern "C" __global__ void block_attention_attend_##SUFFIX(                                                      \
        const T* query, const T* key_cache, const T* value_cache, T* output, const i64* block_position_ids,          \
        const i64* context_position_ids, const i64* context_start, const i64* context_rows, const i64* block_rows,   \
        const float* cos, const float* sin, const float* norm, i64 batches, i64 most_block, i64 most_context,        \
        i64 capacity, i64 heads, i64 kv_heads, i64 head_dim, i64 half, i64 positions, i64 is_interleaved,            \
        i64 epsilon, i64 scale, i64 softcap, i64 is_causal, i64 window                                               \
    ) {                                                                                                              \
        attend(                                                                                                      \
            query, key_cache, value_cache, output, block_position_ids, context_position_ids, context_start,          \
            context_rows, block_rows, cos, sin, norm, batches, most_block, most_context, capacity, heads, kv_heads,  \
            head_dim, half, positions, is_interleaved, epsilon, scale, softcap, is_causal, window                    \
        );                                                                                                           \
    }
BLOCK_ATTENTION(float, f32)
BLOCK_ATTENTION(f16, f16)
BLOCK_ATTENTION(bf16, bf16)
