// What a mechanism brings from a file: data that Python has read, checked against the model and handed over as plain
// numbers. A member that needs none ignores it.
#pragma once
#include <cstdint>
#include <vector>

namespace moestream {

struct Seeds {
    // `pinned`: by global expert, how much it is worth; empty when the policy takes no seed.
    std::vector<double> priority;

    // `ridge`: by bank, the map that scores the bank's experts from what was routed before it; empty: no prediction.
    // Inputs are the experts of the bank before (for this token), then those of this bank (for the token before).
    struct Linear {
        uint32_t inputs = 0;
        std::vector<float> weights;  // [experts][inputs]
        std::vector<float> bias;     // [experts]
    };
    std::vector<Linear> ridge;
    uint32_t ridge_wishes = 1;  // experts named a layer

    // `oracle`: the routes of a trace in order, global experts; route r is experts[start[r]] .. experts[start[r + 1]].
    std::vector<uint32_t> oracle_experts;
    std::vector<uint64_t> oracle_start;
};

}  // namespace moestream
