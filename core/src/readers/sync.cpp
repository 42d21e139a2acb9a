// sync: one pread at a time in the thread that runs the decode: the simplest reader, and the one to compare with.
//
// A demand read is done inside submit (or promote); a speculative one waits until it is promoted or a sleeping reap
// has nothing better to do, because here nothing happens beside the caller.
#include <unistd.h>

#include <cerrno>

#include "readers/pread.h"

namespace moestream {

int64_t pread_once(PreadFunction pread, const Piece& piece) {
    const ssize_t got =
        pread(piece.read.fd, piece.address(), piece.bytes(), static_cast<off_t>(piece.offset()));
    return got < 0 ? -int64_t{errno} : int64_t{got};
}

namespace {

class Sync : public Reader {
  public:
    Sync(const ReaderOptions& options, PreadFunction pread) : queue_(options), pread_(pread) {}

    void submit(const Read& read, Urgency urgency) override {
        const uint64_t start = monotonic_ns();
        queue_.push(read, urgency);
        run_demand();
        queue_.counters.submit_ns += monotonic_ns() - start;
    }
    size_t reap(std::span<Completion> out, bool wait) override {
        if (wait && !out.empty() && queue_.finished() == 0) {
            const uint64_t start = monotonic_ns();
            while (queue_.finished() == 0 && queue_.startable()) run_piece();
            queue_.counters.wait_ns += monotonic_ns() - start;
        }
        return queue_.take(out);
    }
    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        queue_.drop_speculative(dropped);
    }
    void promote(uint32_t tag) override {
        const uint64_t start = monotonic_ns();
        queue_.promote(tag);
        run_demand();
        queue_.counters.submit_ns += monotonic_ns() - start;
    }
    size_t in_flight() const override { return queue_.in_flight(); }
    uint32_t depth() const override { return 1; }
    const ReaderCounters& counters() const override { return queue_.counters; }

  private:
    void run_piece() {
        Piece piece = queue_.start();
        while (queue_.digest(piece, pread_once(pread_, piece)) == Next::again) continue;
    }
    void run_demand() {
        while (queue_.demand_startable()) run_piece();
    }

    Queue queue_;
    PreadFunction pread_;
};

const ReaderRegistration registration(
    "sync", "one pread at a time in the decoding thread",
    [](const ReaderOptions& options, const std::string& argument) {
        expect_no_argument("sync", argument);
        return make_sync(options, ::pread);
    });

}  // namespace

std::unique_ptr<Reader> make_sync(const ReaderOptions& options, PreadFunction pread) {
    return std::make_unique<Sync>(options, pread);
}

}  // namespace moestream
