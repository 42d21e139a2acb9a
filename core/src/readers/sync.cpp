// sync: one pread at a time in the thread that runs the decode: the simplest reader, and the one to compare with.
#include <unistd.h>

#include <cerrno>

#include "immediate.h"

namespace moestream {
namespace {

class Sync : public Immediate {
  public:
    using Immediate::Immediate;

  private:
    Completion perform(const Read& read) override {
        Progress progress{read};
        Completion completion;
        Next next = Next::again;
        while (next == Next::again) {
            const ssize_t got =
                pread(read.fd, progress.address(), progress.bytes(), static_cast<off_t>(progress.offset()));
            next = advance(progress, got < 0 ? -errno : got, counters_, completion);
        }
        return completion;
    }
};

const ReaderRegistration registration(
    "sync", "one pread at a time in the decoding thread",
    [](const ReaderOptions& options, const std::string&) { return std::make_unique<Sync>(options); });

}  // namespace
}  // namespace moestream
