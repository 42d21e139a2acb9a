// null: completes at once and reads nothing. For replaying routes and for measuring the engine's own cost; what a
// model computes over it is garbage, so no mechanism string that `run` takes has a place for the name.
#include "readers/queue.h"

namespace moestream {
namespace {

class Null : public Reader {
  public:
    explicit Null(const ReaderOptions& options) : queue_(options) {}

    void submit(const Read& read, Urgency urgency) override {
        queue_.push(read, urgency);
        while (queue_.startable()) {
            Piece piece = queue_.start();
            queue_.digest(piece, piece.bytes());
        }
    }
    size_t reap(std::span<Completion> out, bool) override { return queue_.take(out); }
    void drop_speculative(const std::function<void(const Read&)>&) override {}
    void promote(uint32_t) override {}
    size_t in_flight() const override { return queue_.in_flight(); }
    uint32_t depth() const override { return 1; }
    const ReaderCounters& counters() const override { return queue_.counters; }

  private:
    Queue queue_;
};

const ReaderRegistration registration(
    "null", "reads NOTHING and completes at once: for replay and the engine's own cost, never for text",
    [](const ReaderOptions& options, const std::string& argument) {
        expect_no_argument("null", argument);
        return std::make_unique<Null>(options);
    });

}  // namespace
}  // namespace moestream
