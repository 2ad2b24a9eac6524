// Suffix decoding's index, see sched/suffix.py, which says what each function computes. Not a command: it works on the host's texts.

enum { LENGTHS = 3, MOST_PLACES = 16, BREAK = -1 };

typedef struct {
    int64_t mask, end, low;
    int32_t *text;
    uint32_t *hashes[LENGTHS]; // of the last 8, 4 and 2 tokens
    int32_t *latest[LENGTHS], *before[LENGTHS];
} Suffixes;

static uint32_t mixed(uint32_t hash) { return (hash ^ hash >> 15) * 0x2C1B3C6Du; }

static void chain(Suffixes *index, int number, int64_t end, uint32_t hash)
{
    int64_t slot = hash & index->mask, place = end & index->mask;
    index->hashes[number][place] = hash;
    index->before[number][place] = index->latest[number][slot];
    index->latest[number][slot] = (int32_t)end;
}

void pagerunner_suffix_extend(Suffixes *index, const int32_t *tokens, long count)
{
    int64_t mask = index->mask, end = index->end;
    for (long at = 0; at < count; at++) {
        uint32_t last = (uint32_t)index->text[(end - 1) & mask], token = (uint32_t)tokens[at];
        index->text[end & mask] = tokens[at];
        end++;
        uint32_t hash = mixed((last * 0x9E3779B1u) ^ (token * 0x85EBCA6Bu));
        chain(index, 2, end, hash);
        hash = mixed((index->hashes[2][(end - 2) & mask] * 0x9E3779B1u) ^ hash);
        chain(index, 1, end, hash);
        hash = mixed((index->hashes[1][(end - 4) & mask] * 0x9E3779B1u) ^ hash);
        chain(index, 0, end, hash);
    }
    index->end = end;
    index->low = max(index->low, end - mask - 1);
}

static long matching(const Suffixes *index, int64_t position, const Suffixes *other, long longest)
{
    long most = min(longest, min(position - index->low, other->end - other->low));
    for (long back = 1; back <= most; back++) {
        int32_t token = index->text[(position - back) & index->mask];
        if (token != other->text[(other->end - back) & other->mask] || token == BREAK) return back - 1;
    }
    return most;
}

typedef struct { long length; int64_t position; } Place;

// Sorted by length and then by position, the largest first.
static int places(const Suffixes *index, const Suffixes *other, long longest, Place *found)
{
    static const long lengths[LENGTHS] = {8, 4, 2};
    for (int number = 0; number < LENGTHS; number++) {
        if (other->end - other->low < lengths[number]) continue;
        int64_t position = index->latest[number][other->hashes[number][other->end & other->mask] & index->mask];
        int count = 0;
        for (int turn = 0; turn <= MOST_PLACES; turn++) {
            if (position <= index->low || position > index->end) break;
            long length = position < index->end ? matching(index, position, other, longest) : 0;
            if (length >= lengths[number]) {
                int at = count++;
                for (; at && found[at - 1].length < length; at--) found[at] = found[at - 1]; // positions come in falling order
                found[at] = (Place){length, position};
            }
            int64_t earlier = index->before[number][position & index->mask];
            if (earlier >= position) break;
            position = earlier;
        }
        if (count) return min(count, MOST_PLACES);
    }
    return 0;
}

static double follow(const Suffixes *index, const Place *found, int count, long most, double least, int32_t *tokens, long *written)
{
    int64_t positions[MOST_PLACES];
    volatile double score = 0, chance = 1; // rounded as in Python: nothing is contracted
    for (int at = 0; at < count; at++) positions[at] = found[at].position;
    *written = 0;
    for (long ahead = 0; ahead < most; ahead++) {
        int32_t token = BREAK;
        int votes = 0, kept = 0;
        for (int at = 0; at < count; at++) {
            if (positions[at] + ahead >= index->end) continue;
            int32_t own = index->text[(positions[at] + ahead) & index->mask];
            int equal = 0;
            for (int one = at; one < count; one++)
                equal += positions[one] + ahead < index->end && index->text[(positions[one] + ahead) & index->mask] == own;
            if (equal > votes) votes = equal, token = own;
        }
        if (!votes) break;
        chance = chance * ((double)votes / count);
        if (token == BREAK || chance < least) break;
        tokens[(*written)++] = token;
        score = score + chance;
        for (int at = 0; at < count; at++)
            if (positions[at] + ahead < index->end && index->text[(positions[at] + ahead) & index->mask] == token) positions[kept++] = positions[at];
        count = kept;
    }
    return score;
}

typedef struct { int64_t longest; double factor, least; } Bounds;

// Replaces the *count tokens by some with a score above `above`, if there are such. Returns the score of the tokens.
static double best(const Suffixes *index, const Suffixes *text, long most, double above, const Bounds *bounds, int32_t *tokens, long *count)
{
    Place found[MOST_PLACES + 1];
    int32_t own[most];
    int known = places(index, text, bounds->longest, found);
    for (int number = 0; number < known; number++) {
        long budget = min(most, (long)(bounds->factor * found[number].length)), written;
        if (budget <= above) break;
        if (number + 1 < known && found[number + 1].length == found[number].length) continue;
        double score = follow(index, found, number + 1, budget, bounds->least, own, &written);
        if (score > above) {
            above = score;
            *count = written;
            memcpy(tokens, own, written * sizeof *own);
        }
    }
    return above;
}

// How the text goes on by what it says itself and, if there are answers, by what they say. Returns the number of tokens; `most` is above 0.
long pagerunner_suffix_draft(const Suffixes *text, const Suffixes *answers, long most, const Bounds *bounds, int32_t *tokens)
{
    long count = 0;
    double score = best(text, text, most, 0, bounds, tokens, &count);
    if (answers && score < most) best(answers, text, most, score, bounds, tokens, &count);
    return count;
}
