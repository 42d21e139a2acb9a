// oracle:FILE: the routes of a trace, read from the file in advance: what a perfect predictor would gain. It is exact
// for as long as the run routes as the trace did, and says nothing from the first difference on.
#include <algorithm>
#include <vector>

#include "moestream/predictor.h"

namespace moestream {
namespace {

class Oracle : public Predictor {
  public:
    Oracle(const SlabIndex& index, std::vector<uint32_t> experts, std::vector<uint64_t> start)
        : index_(index), experts_(std::move(experts)), start_(std::move(start)) {
        if (start_.size() < 2) throw Error(ErrorKind::usage, "oracle:FILE needs a trace with routes");
        if (start_.front() != 0 || start_.back() != experts_.size() ||
            std::adjacent_find(start_.begin(), start_.end(), std::greater_equal<>()) != start_.end() ||
            std::any_of(experts_.begin(), experts_.end(), [&](uint32_t e) { return e >= index.experts(); })) {
            throw Error(ErrorKind::usage, "the oracle's routes are not routes of this model");
        }
    }

    std::span<const uint32_t> predict(const Choice& choice) override {
        if (lost_) return {};
        skip_unseen(choice.bank);
        lost_ = !at(choice);
        if (lost_) return {};
        ++at_;
        return route();
    }

  private:
    std::span<const uint32_t> route() const {
        if (at_ + 1 >= start_.size()) return {};
        return {experts_.data() + start_[at_], experts_.data() + start_[at_ + 1]};
    }

    // A bank whose choice is not seen is read whole: the trace has that as a route, a predictor is not told of it.
    void skip_unseen(uint32_t bank) {
        for (auto next = route(); !next.empty(); next = route()) {
            const uint32_t other = index_.bank_of(next.front());
            if (other == bank || next.size() != index_.banks()[other].count) return;
            ++at_;
        }
    }

    bool at(const Choice& choice) const {
        const auto expected = route();
        return std::equal(expected.begin(), expected.end(), choice.routed.begin(), choice.routed.end(),
                          [](uint32_t expert, const RoutedExpert& routed) { return expert == routed.expert; });
    }

    const SlabIndex& index_;
    std::vector<uint32_t> experts_;
    std::vector<uint64_t> start_;
    size_t at_ = 0;
    bool lost_ = false;
};

const PredictorRegistration registration(
    "oracle", "the routes of a trace of the same prompt: what perfect foresight would gain; takes the trace's FILE",
    [](const SlabIndex& index, const abi::Ops&, const std::string&, const Seeds& seeds) {
        return std::make_unique<Oracle>(index, seeds.oracle_experts, seeds.oracle_start);
    });

}  // namespace
}  // namespace moestream
