#include "moestream/reader.h"

#include <time.h>

#include <algorithm>

#include <cerrno>

#include "readers/lanes.h"

namespace moestream {

std::unique_ptr<Reader> make_reader(std::string_view text, const ReaderOptions& options) {
    std::string argument;
    const auto& factory = Registry<ReaderFactory>::instance().find(text, argument);
    return factory(options, argument);
}

uint64_t monotonic_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

Next advance(Progress& progress, int64_t result, ReaderCounters& counters, Completion& completion) {
    int32_t error = 0;
    if (result == -EINTR || result == -EAGAIN) {
        ++counters.retries;
        return Next::again;
    }
    if (result == -EIO && !progress.retried) {
        progress.retried = true;
        ++counters.retries;
        return Next::again;
    }
    if (result < 0) {
        error = static_cast<int32_t>(-result);
    } else {
        const uint32_t reached = progress.from() + static_cast<uint32_t>(result);
        // Nothing new: the file ends here, before the bytes that were asked for.
        if (reached <= progress.done) error = ENODATA;
        progress.done = std::max(progress.done, reached);
        if (error == 0 && progress.done < progress.read.bytes) {
            ++counters.retries;
            return Next::again;
        }
    }
    if (error == 0) {
        ++counters.reads;
        counters.bytes += progress.read.bytes;
    }
    completion = {progress.read.tag, error, progress.read.offset + progress.done, monotonic_ns()};
    return Next::finished;
}

}  // namespace moestream
