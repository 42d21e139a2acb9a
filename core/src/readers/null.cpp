// null: completes at once and reads nothing. For replaying routes and for measuring the engine's own cost; what a
// model computes over it is garbage, so `run` does not know the name.
#include "immediate.h"

namespace moestream {
namespace {

class Null : public Immediate {
  public:
    using Immediate::Immediate;

  private:
    Completion perform(const Read& read) override {
        ++counters_.reads;
        counters_.bytes += read.bytes;
        return {read.tag, 0, read.offset + read.bytes, monotonic_ns()};
    }
};

const ReaderRegistration registration(
    "null", "reads nothing: for replay and for the engine's own cost, never for text",
    [](const ReaderOptions& options, const std::string&) { return std::make_unique<Null>(options); });

}  // namespace
}  // namespace moestream
