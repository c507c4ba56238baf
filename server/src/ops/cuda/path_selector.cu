// PathSelector: one block of 32 warps for each sequence.
//
// The warps share out the slots and, within a slot, its logits; each finds the best candidates of its part, then one warp a slot merges them.
// The walk goes through the slots one after the other: the warps share out the candidates of a slot, and the first warp chooses.
// Everything has a fixed order, so what a sequence gets does not depend on the batch.
//
// Values that are out of their limits can't be reported from here: such a sequence gets no proposal.

constexpr int SELECTOR_WARPS = 32;
constexpr u32 NO_COLUMN = 0xffffffffu;

struct Candidate {
    float score;
    u32 column;
};

__device__ inline Candidate no_candidate() { return {-infinity(), NO_COLUMN}; }

// Larger scores first, of equal ones the lower column; anything before nothing. False for NaN.
__device__ inline bool better(Candidate a, Candidate b) {
    if (a.column == NO_COLUMN || b.column == NO_COLUMN) {
        return a.column != NO_COLUMN;
    }
    return a.score > b.score || (a.score == b.score && a.column < b.column);
}

__device__ inline Candidate warp_best(Candidate mine) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Candidate other = {
            __shfl_xor_sync(ALL_LANES, mine.score, offset), __shfl_xor_sync(ALL_LANES, mine.column, offset)
        };
        if (better(other, mine)) {
            mine = other;
        }
    }
    return mine;
}

// One warp: the best `count` of logits[first..end), in order, to `best`. Whether none of these logits is NaN or +infinity.
__device__ bool warp_top_k(const float* logits, i64 first, i64 end, int count, Candidate* best) {
    int lane = threadIdx.x % WARP;
    Candidate mine = no_candidate();
    bool is_bad = false;
    for (i64 column = first + lane; column < end; column += WARP) {
        Candidate candidate = {logits[column], u32(column)};
        is_bad |= !(candidate.score < infinity());
        if (better(candidate, mine)) {
            mine = candidate;
        }
    }
    for (int index = 0; index < count; index++) {
        Candidate taken = warp_best(mine);
        if (lane == 0) {
            best[index] = taken;
        }
        if (taken.column == NO_COLUMN) {
            continue;
        }
        // The lane that had it needs its next one; all lanes look for it.
        i64 owner = (taken.column - first) % WARP;
        Candidate next = no_candidate();
        for (i64 column = first + owner + i64(lane) * WARP; column < end; column += WARP * WARP) {
            Candidate candidate = {logits[column], u32(column)};
            if (better(taken, candidate) && better(candidate, next)) {
                next = candidate;
            }
        }
        next = warp_best(next);
        if (lane == owner) {
            mine = next;
        }
    }
    return !warp_any(is_bad);
}

// One warp: the best `count` of `total` candidates, in order, to `best`.
__device__ void warp_merge(const Candidate* parts, int total, int count, Candidate* best) {
    int lane = threadIdx.x % WARP;
    Candidate taken = {infinity(), 0};
    for (int index = 0; index < count; index++) {
        Candidate mine = no_candidate();
        for (int part = lane; part < total; part += WARP) {
            if (better(taken, parts[part]) && better(parts[part], mine)) {
                mine = parts[part];
            }
        }
        taken = warp_best(mine);
        if (lane == 0) {
            best[index] = taken;
        }
    }
}

__device__ inline u32 rotated(u32 x, int bits) { return (x << bits) | (x >> (32 - bits)); }

__device__ inline void quarter_round(u32& a, u32& b, u32& c, u32& d) {
    a += b;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 12);
    a += b;
    d = rotated(d ^ a, 8);
    c += d;
    b = rotated(b ^ c, 7);
}

// The noise of a token at a position: a word of ChaCha8, under the key and with the stream that the sampler uses.
__device__ u32 noise_word(u64 seed, u64 position, u32 token) {
    u32 start[16] = {
        // "expand 32-byte k" and "outrider noise 1"
        0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, 0x7274756fu, 0x72656469u, 0x696f6e20u, 0x31206573u,
        u32(seed), u32(seed >> 32), 0, 0, token / 16, 0, u32(position), u32(position >> 32)
    };
    u32 x[16];
    for (int i = 0; i < 16; i++) {
        x[i] = start[i];
    }
    for (int round = 0; round < 4; round++) {
        quarter_round(x[0], x[4], x[8], x[12]);
        quarter_round(x[1], x[5], x[9], x[13]);
        quarter_round(x[2], x[6], x[10], x[14]);
        quarter_round(x[3], x[7], x[11], x[15]);
        quarter_round(x[0], x[5], x[10], x[15]);
        quarter_round(x[1], x[6], x[11], x[12]);
        quarter_round(x[2], x[7], x[8], x[13]);
        quarter_round(x[3], x[4], x[9], x[14]);
    }
    u32 word = 0;
    for (int i = 0; i < 16; i++) {
        word = int(token % 16) == i ? x[i] + start[i] : word;
    }
    return word;
}

// One warp: the index of the candidate to take; -1 when a score is NaN or +infinity, or all are -infinity.
__device__ int choose(const float* scores, const u32* tokens, int count, float temperature, u64 seed, u64 position) {
    int lane = threadIdx.x % WARP;
    Candidate largest = no_candidate();
    bool is_bad = false;
    for (int index = lane; index < count; index += WARP) {
        is_bad |= !(scores[index] < infinity());
        Candidate candidate = {scores[index], u32(index)};
        if (better(candidate, largest)) {
            largest = candidate;
        }
    }
    largest = warp_best(largest);
    if (warp_any(is_bad) || !is_finite(largest.score)) {
        return -1;
    }
    if (temperature == 0.0f) {
        return int(largest.column);
    }
    double inverse_temperature = 1.0 / double(temperature);
    double best_time = 0.0;
    int winner = -1;
    for (int index = lane; index < count; index += WARP) {
        double weight = exp(double(scores[index] - largest.score) * inverse_temperature);
        double uniform = (double(noise_word(seed, position, tokens[index])) + 0.5) / 4294967296.0;
        double time = -log(uniform) / weight;
        bool is_finite_time = time - time == 0.0;
        if (is_finite_time
            && (winner < 0 || time < best_time || (time == best_time && tokens[index] < tokens[winner]))) {
            best_time = time;
            winner = index;
        }
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        double other_time = __shfl_xor_sync(ALL_LANES, best_time, offset);
        int other = __shfl_xor_sync(ALL_LANES, winner, offset);
        if (other >= 0
            && (winner < 0 || other_time < best_time
                || (other_time == best_time && tokens[other] < tokens[winner]))) {
            best_time = other_time;
            winner = other;
        }
    }
    return winner < 0 ? int(largest.column) : winner;
}

template <typename T>
__device__ void select_path(
    const float* logits, const i64* block_ids, const i64* block_position_ids, const i64* block_rows,
    const float* temperature, const i64* seed, const i64* candidate_topk, const T* hidden, const T* predecessor,
    const T* successor, const i64* column_token_ids, i64* draft_ids, i64* candidate_ids, float* path_scores, i64 slots,
    i64 columns, i64 top_k, i64 rank, i64 vocabulary
) {
    // In this order in shared memory; the launcher counts the same bytes.
    DYNAMIC_SHARED(memory);
    Candidate* parts = reinterpret_cast<Candidate*>(memory);      // [SELECTOR_WARPS, top_k]
    Candidate* best = parts + SELECTOR_WARPS * top_k;             // [slots, top_k]
    u32* tokens = reinterpret_cast<u32*>(best + slots * top_k);   // [slots, top_k]
    float* scores = reinterpret_cast<float*>(tokens + slots * top_k); // [top_k]
    float* weights = scores + top_k;                              // [rank]
    u32* is_good = reinterpret_cast<u32*>(weights + rank);        // [SELECTOR_WARPS]
    int* chosen = reinterpret_cast<int*>(is_good + SELECTOR_WARPS); // [1]

    i64 batch = blockIdx.x;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    draft_ids += batch * slots;
    for (i64 slot = threadIdx.x; slot < slots; slot += blockDim.x) {
        draft_ids[slot] = -1;
    }
    for (i64 place = threadIdx.x; place < slots * top_k; place += blockDim.x) {
        if (candidate_ids) {
            candidate_ids[batch * slots * top_k + place] = -1;
        }
        if (path_scores) {
            path_scores[batch * slots * top_k + place] = -infinity();
        }
    }

    i64 rows = block_rows[batch], anchor = block_ids[batch * (slots + 1)];
    float heat = temperature[batch];
    int count = int(candidate_topk[0]);
    bool is_valid = rows <= slots + 1 && candidate_topk[0] >= 1 && candidate_topk[0] <= top_k && heat >= 0.0f
        && is_finite(heat) && (vocabulary == 0 || (anchor >= 0 && anchor < vocabulary));
    if (rows < 2 || !is_valid) {
        return;
    }
    int drafted = int(rows) - 1;

    int warps_per_slot = SELECTOR_WARPS / drafted;
    int slot_of_warp = warp / warps_per_slot, part = warp % warps_per_slot;
    if (slot_of_warp < drafted) {
        bool good = warp_top_k(
            logits + (batch * slots + slot_of_warp) * columns, columns * part / warps_per_slot,
            columns * (part + 1) / warps_per_slot, count, parts + warp * count
        );
        if (lane == 0) {
            is_good[warp] = good;
        }
    }
    __syncthreads();
    bool slot_is_good = true;
    if (warp < drafted) {
        warp_merge(parts + warp * warps_per_slot * count, warps_per_slot * count, count, best + warp * count);
        for (int index = 0; index < warps_per_slot; index++) {
            slot_is_good &= is_good[warp * warps_per_slot + index] != 0;
        }
    }
    __syncthreads();
    if (warp < drafted) {
        slot_is_good &= best[warp * count].score > -infinity();
        slot_is_good &= block_position_ids[batch * (slots + 1) + warp + 1] >= 0;
        i64 limit = vocabulary > 0 ? vocabulary : i64(1) << 32;
        bool is_bad = false;
        for (int index = lane; index < count; index += WARP) {
            i64 column = best[warp * count + index].column;
            i64 token = column_token_ids && column < columns ? column_token_ids[column] : column;
            is_bad |= token < 0 || token >= limit;
            tokens[warp * count + index] = u32(token);
        }
        slot_is_good &= !warp_any(is_bad);
        if (lane == 0) {
            is_good[warp] = slot_is_good;
        }
    }
    __syncthreads();

    i64 before = anchor;
    for (int slot = 0; slot < drafted && is_good[slot]; slot++) {
        i64 row = batch * slots + slot;
        for (i64 r = threadIdx.x; r < rank; r += blockDim.x) {
            weights[r] = wide(predecessor[before * rank + r]) * wide(hidden[row * rank + r]);
        }
        __syncthreads();
        for (int index = warp; index < count; index += SELECTOR_WARPS) {
            float sum = 0.0f;
            for (i64 r = lane; r < rank; r += WARP) {
                sum += weights[r] * wide(successor[tokens[slot * count + index] * rank + r]);
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                scores[index] = best[slot * count + index].score + sum;
            }
        }
        __syncthreads();
        if (warp == 0) {
            u64 position = u64(block_position_ids[batch * (slots + 1) + slot + 1]);
            int winner = choose(scores, tokens + slot * count, count, heat, u64(seed[batch]), position);
            if (lane == 0) {
                *chosen = winner;
            }
            for (int index = lane; index < count && winner >= 0; index += WARP) {
                if (candidate_ids) {
                    candidate_ids[row * top_k + index] = tokens[slot * count + index];
                }
                if (path_scores) {
                    path_scores[row * top_k + index] = scores[index];
                }
            }
        }
        __syncthreads();
        if (*chosen < 0) {
            return;
        }
        before = tokens[slot * count + *chosen];
        if (threadIdx.x == 0) {
            draft_ids[slot] = before;
        }
        // The next slot must not write what this one still reads.
        __syncthreads();
    }
}

#define PATH_SELECTOR(T, SUFFIX)                                                                                     \
    extern "C" __global__ void path_selector_##SUFFIX(                                                               \
        const float* logits, const i64* block_ids, const i64* block_position_ids, const i64* block_rows,             \
        const float* temperature, const i64* seed, const i64* candidate_topk, const T* hidden, const T* predecessor, \
        const T* successor, const i64* column_token_ids, i64* draft_ids, i64* candidate_ids, float* path_scores,     \
        i64 slots, i64 columns, i64 top_k, i64 rank, i64 vocabulary                                                  \
    ) {                                                                                                              \
        select_path(                                                                                                 \
            logits, block_ids, block_position_ids, block_rows, temperature, seed, candidate_topk, hidden,            \
            predecessor, successor, column_token_ids, draft_ids, candidate_ids, path_scores, slots, columns, top_k,  \
            rank, vocabulary                                                                                         \
        );                                                                                                           \
    }
PATH_SELECTOR(float, f32)
PATH_SELECTOR(f16, f16)
PATH_SELECTOR(bf16, bf16)
