// What predictors remember of the choices made so far.
#pragma once
#include <charconv>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moestream/predictor.h"

namespace moestream {

// N of `name:N`, experts named a bank; 1 when the text is empty. Throws Error(usage).
inline uint32_t parse_wishes(const std::string& name, std::string_view argument) {
    if (argument.empty()) return 1;
    uint32_t count = 0;
    const auto [end, error] = std::from_chars(argument.data(), argument.data() + argument.size(), count);
    if (error != std::errc() || end != argument.data() + argument.size() || count == 0 || count > 64) {
        throw Error(ErrorKind::usage, name + ":N takes a number of experts from 1 to 64, not '" +
                                          std::string(argument) + "'");
    }
    return count;
}

// By bank: what its last token chose, and which bank was routed after it. Which banks a model routes, and in which
// order, is learnt from the routes: chunk experts and prediction heads have banks that no choice is seen of.
class History {
  public:
    explicit History(const SlabIndex& index) : last_(index.banks().size()), next_(index.banks().size(), kNone) {
        for (uint32_t b = 0; b < last_.size(); ++b) last_[b].reserve(index.banks()[b].count);
    }

    void add(const Choice& choice) {
        if (before_ != kNone) next_[before_] = choice.bank;
        before_ = choice.bank;
        const auto& ids = choice.ids;
        const auto* row = reinterpret_cast<const int32_t*>(static_cast<const char*>(ids.data) +
                                                           (ids.ne[1] - 1) * ids.nb[1]);
        last_[choice.bank].assign(row, row + ids.ne[0]);
    }

    // The bank that was routed after this one the last time; kNone when it never was.
    uint32_t next(uint32_t bank) const { return next_[bank]; }
    // Numbers inside the bank in the router's order; empty when it has not been routed.
    std::span<const uint32_t> last(uint32_t bank) const { return last_[bank]; }

  private:
    std::vector<std::vector<uint32_t>> last_;
    std::vector<uint32_t> next_;
    uint32_t before_ = kNone;
};

}  // namespace moestream
