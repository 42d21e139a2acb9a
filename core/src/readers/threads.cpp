// threads:N: N threads that pread. For kernels and containers that refuse io_uring.
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "lanes.h"

namespace moestream {
namespace {

constexpr uint32_t kDefaultThreads = 4;
constexpr uint32_t kMaxThreads = 64;

class Threads : public Reader {
  public:
    Threads(const ReaderOptions& options, uint32_t count) : lanes_(options.max_queued) {
        done_.reserve(options.max_queued);
        for (uint32_t i = 0; i < count; ++i) workers_.emplace_back([this] { work(); });
    }
    ~Threads() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            while (!lanes_.empty()) lanes_.pop();
        }
        queued_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    void submit(const Read& read, Urgency urgency) override {
        const uint64_t start = monotonic_ns();
        {
            const std::lock_guard lock(mutex_);
            lanes_.push(read, urgency);
        }
        queued_.notify_one();
        ++in_flight_;
        counters_.submit_ns += monotonic_ns() - start;
    }

    size_t reap(std::span<Completion> out, bool wait) override {
        if (in_flight_ == 0 || out.empty()) return 0;
        std::unique_lock lock(mutex_);
        if (done_.empty() && wait) {
            const uint64_t start = monotonic_ns();
            finished_.wait(lock, [this] { return !done_.empty(); });
            counters_.wait_ns += monotonic_ns() - start;
        }
        const size_t count = std::min(out.size(), done_.size());
        std::copy_n(done_.end() - static_cast<ptrdiff_t>(count), count, out.begin());
        done_.resize(done_.size() - count);
        in_flight_ -= count;
        counters_.reads = worked_.reads;
        counters_.bytes = worked_.bytes;
        counters_.retries = worked_.retries;
        return count;
    }

    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        const std::lock_guard lock(mutex_);
        lanes_.drop_speculative([&](const Read& read) {
            dropped(read);
            --in_flight_;
        });
    }
    void promote(uint32_t tag) override {
        const std::lock_guard lock(mutex_);
        lanes_.promote(tag);
    }
    size_t in_flight() const override { return in_flight_; }
    const ReaderCounters& counters() const override { return counters_; }

  private:
    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            queued_.wait(lock, [this] { return stopping_ || !lanes_.empty(); });
            if (lanes_.empty()) return;
            Progress progress{lanes_.pop()};
            Completion completion;
            Next next = Next::again;
            while (next == Next::again) {
                lock.unlock();
                const ssize_t got = pread(progress.read.fd, progress.address(), progress.bytes(),
                                          static_cast<off_t>(progress.offset()));
                const int64_t result = got < 0 ? -errno : got;
                lock.lock();
                next = advance(progress, result, worked_, completion);
            }
            done_.push_back(completion);
            finished_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable queued_;
    std::condition_variable finished_;
    Lanes lanes_;
    std::vector<Completion> done_;  // at most max_queued: a read is in a lane, in a thread or here
    ReaderCounters worked_;         // under the mutex; counters_ is the caller's copy
    ReaderCounters counters_;
    std::vector<std::thread> workers_;
    size_t in_flight_ = 0;
    bool stopping_ = false;
};

const ReaderRegistration registration(
    "threads", "a pool of N threads that pread (default 4)",
    [](const ReaderOptions& options, const std::string& argument) -> std::unique_ptr<Reader> {
        uint32_t count = kDefaultThreads;
        if (!argument.empty()) {
            const auto [end, error] = std::from_chars(argument.data(), argument.data() + argument.size(), count);
            if (error != std::errc() || end != argument.data() + argument.size() || count < 1 || count > kMaxThreads) {
                throw Error(ErrorKind::usage, "threads:N takes 1 to 64 threads, not '" + argument + "'");
            }
        }
        return std::make_unique<Threads>(options, count);
    });

}  // namespace
}  // namespace moestream
