// random:N: N experts of the next bank drawn without looking: the control. What any reading ahead costs, and the little
// it gains, shows here. The same sequence in every run.
#include <algorithm>
#include <numeric>
#include <vector>

#include "moestream/predictor.h"
#include "predictors/history.h"

namespace moestream {
namespace {

constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;

class Random : public Predictor {
  public:
    Random(const SlabIndex& index, uint32_t wishes) : index_(index), history_(index), wanted_(wishes) {
        uint32_t widest = 0;
        for (const auto& bank : index.banks()) widest = std::max(widest, bank.count);
        drawn_.resize(widest);
    }

    std::span<const uint32_t> predict(const Choice& choice) override {
        history_.add(choice);
        const uint32_t next = history_.next(choice.bank);
        if (next == kNone || choice.ids.ne[1] != 1) return {};
        const auto& bank = index_.banks()[next];
        std::iota(drawn_.begin(), drawn_.begin() + bank.count, bank.first_expert);
        const uint32_t count = std::min(wanted_, bank.count);
        for (uint32_t i = 0; i < count; ++i) std::swap(drawn_[i], drawn_[i + draw() % (bank.count - i)]);
        return {drawn_.data(), count};
    }

  private:
    // splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    uint64_t draw() {
        uint64_t z = (state_ += kSeed);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }

    const SlabIndex& index_;
    History history_;
    uint32_t wanted_;
    uint64_t state_ = kSeed;
    std::vector<uint32_t> drawn_;
};

const PredictorRegistration registration(
    "random", "experts drawn without looking, the control; N experts a layer (default 1)",
    [](const SlabIndex& index, const abi::Ops&, const std::string& argument, const Seeds&) {
        return std::make_unique<Random>(index, parse_wishes("random", argument));
    });

}  // namespace
}  // namespace moestream
