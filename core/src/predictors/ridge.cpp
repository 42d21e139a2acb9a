// ridge:FILE: a linear map, fitted on traces, from choices already made to the next bank's: this token's choice in the
// bank before, and the next bank's own for the token before. Inputs are ones and zeros, so a score is a sum of k + k
// weights.
#include <algorithm>
#include <numeric>
#include <vector>

#include "moestream/predictor.h"
#include "predictors/history.h"

namespace moestream {
namespace {

class Ridge : public Predictor {
  public:
    Ridge(const SlabIndex& index, const Seeds& seeds)
        : index_(index), history_(index), maps_(seeds.ridge), wanted_(seeds.ridge_wishes) {
        if (maps_.size() != index.banks().size()) {
            throw Error(ErrorKind::usage, "ridge:FILE needs a file made by `moestream fit` from this model's traces");
        }
        uint32_t widest = 0;
        for (uint32_t b = 0; b < maps_.size(); ++b) {
            const size_t count = index.banks()[b].count;
            widest = std::max(widest, index.banks()[b].count);
            if (maps_[b].weights.empty()) continue;
            if (maps_[b].bias.size() != count || maps_[b].weights.size() != count * maps_[b].inputs) {
                throw Error(ErrorKind::usage, "the map of bank " + std::to_string(b) + " has another shape");
            }
        }
        score_.resize(widest);
        order_.resize(widest);
    }

    std::span<const uint32_t> predict(const Choice& choice) override {
        history_.add(choice);
        const uint32_t next = history_.next(choice.bank);
        if (next == kNone || choice.ids.ne[1] != 1) return {};
        const auto& map = maps_[next];
        const auto& bank = index_.banks()[next];
        const uint32_t before = index_.banks()[choice.bank].count;
        // A map fitted on another order of banks knows nothing of this one.
        if (map.weights.empty() || map.inputs != before + bank.count || history_.last(next).empty()) return {};
        std::copy(map.bias.begin(), map.bias.end(), score_.begin());
        for (const uint32_t id : history_.last(choice.bank)) add(map, id, bank.count);
        for (const uint32_t id : history_.last(next)) add(map, before + id, bank.count);
        const uint32_t count = std::min(wanted_, bank.count);
        std::iota(order_.begin(), order_.begin() + bank.count, 0u);
        std::partial_sort(order_.begin(), order_.begin() + count, order_.begin() + bank.count,
                          [this](uint32_t a, uint32_t b) {
                              return score_[a] > score_[b] || (score_[a] == score_[b] && a < b);
                          });
        for (uint32_t i = 0; i < count; ++i) order_[i] += bank.first_expert;
        return {order_.data(), count};
    }

  private:
    void add(const Seeds::Linear& map, uint32_t input, uint32_t experts) {
        for (uint32_t e = 0; e < experts; ++e) score_[e] += map.weights[size_t{e} * map.inputs + input];
    }

    const SlabIndex& index_;
    History history_;
    std::vector<Seeds::Linear> maps_;
    uint32_t wanted_;
    std::vector<float> score_;
    std::vector<uint32_t> order_;
};

const PredictorRegistration registration(
    "ridge", "a linear map fitted on traces by `moestream fit`; takes its FILE",
    [](const SlabIndex& index, const abi::Ops&, const std::string&, const Seeds& seeds) {
        return std::make_unique<Ridge>(index, seeds);
    });

}  // namespace
}  // namespace moestream
