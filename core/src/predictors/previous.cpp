// previous:N: the N experts that the next bank gave most weight for the token before. What an eviction order already
// knows; a predictor has to beat it.
#include <algorithm>
#include <vector>

#include "moestream/predictor.h"
#include "predictors/history.h"

namespace moestream {
namespace {

class Previous : public Predictor {
  public:
    Previous(const SlabIndex& index, uint32_t wishes) : index_(index), history_(index), wanted_(wishes) {
        wish_.reserve(wishes);
    }

    std::span<const uint32_t> predict(const Choice& choice) override {
        history_.add(choice);
        const uint32_t next = history_.next(choice.bank);
        if (next == kNone || choice.ids.ne[1] != 1) return {};
        const auto last = history_.last(next);
        wish_.clear();
        for (const uint32_t id : last.first(std::min<size_t>(wanted_, last.size()))) {
            wish_.push_back(index_.banks()[next].first_expert + id);
        }
        return wish_;
    }

  private:
    const SlabIndex& index_;
    History history_;
    uint32_t wanted_;
    std::vector<uint32_t> wish_;
};

const PredictorRegistration registration(
    "previous", "what the next layer chose for the token before; N experts a layer (default 1)",
    [](const SlabIndex& index, const abi::Ops&, const std::string& argument, const Seeds&) {
        return std::make_unique<Previous>(index, parse_wishes("previous", argument));
    });

}  // namespace
}  // namespace moestream
