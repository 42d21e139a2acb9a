// threads:N: N threads that pread. For kernels and containers that refuse io_uring.
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "readers/pread.h"

namespace moestream {
namespace {

constexpr uint32_t kDefaultThreads = 4;
constexpr uint32_t kMaxThreads = 64;

// What the caller and the workers share, under `mutex`.
struct Pool {
    Pool(const ReaderOptions& options, PreadFunction pread) : queue(options), pread(pread) {}

    void work() {
        std::unique_lock lock(mutex);
        while (true) {
            queued.wait(lock, [this] { return stopping || queue.startable(); });
            if (!queue.startable()) return;
            Piece piece = queue.start();
            // A split read brings several pieces with one notification: pass it on.
            if (queue.startable()) queued.notify_one();
            Next next = Next::again;
            while (next == Next::again) {
                lock.unlock();
                const int64_t result = pread_once(pread, piece);
                lock.lock();
                next = queue.digest(piece, result);
            }
            finished.notify_one();
        }
    }

    std::mutex mutex;
    std::condition_variable queued;
    std::condition_variable finished;
    Queue queue;
    PreadFunction pread;
    bool stopping = false;
    std::vector<std::thread> workers;
};

class Threads : public Reader {
  public:
    Threads(const ReaderOptions& options, uint32_t threads, PreadFunction pread)
        : pool_(std::make_unique<Pool>(options, pread)), process_(getpid()) {
        pool_->workers.reserve(threads);
        try {
            for (uint32_t i = 0; i < threads; ++i) pool_->workers.emplace_back([pool = pool_.get()] { pool->work(); });
        } catch (const std::system_error& error) {
            stop();
            throw Error(ErrorKind::refused, "cannot start " + std::to_string(threads) + " threads (" + error.what() +
                                                "): use fewer, or sync");
        }
    }
    ~Threads() override {
        // In a child of fork the workers do not exist and the mutex may be held for ever: leave it all behind.
        if (getpid() != process_) {
            (void)pool_.release();
            return;
        }
        stop();
    }

    void submit(const Read& read, Urgency urgency) override {
        const uint64_t start = monotonic_ns();
        {
            const std::lock_guard lock(pool_->mutex);
            pool_->queue.push(read, urgency);
        }
        pool_->queued.notify_one();
        ++in_flight_;
        counters_.submit_ns += monotonic_ns() - start;
    }

    size_t reap(std::span<Completion> out, bool wait) override {
        if (in_flight_ == 0 || out.empty()) return 0;
        std::unique_lock lock(pool_->mutex);
        if (wait && pool_->queue.finished() == 0) {
            const uint64_t start = monotonic_ns();
            pool_->finished.wait(lock, [this] { return pool_->queue.finished() > 0; });
            counters_.wait_ns += monotonic_ns() - start;
        }
        const size_t count = pool_->queue.take(out);
        in_flight_ -= count;
        counters_.reads = pool_->queue.counters.reads;
        counters_.bytes = pool_->queue.counters.bytes;
        counters_.pieces = pool_->queue.counters.pieces;
        counters_.retries = pool_->queue.counters.retries;
        return count;
    }

    void drop_speculative(const std::function<void(const Read&)>& dropped) override {
        const std::lock_guard lock(pool_->mutex);
        pool_->queue.drop_speculative([&](const Read& read) {
            --in_flight_;
            dropped(read);
        });
    }
    void promote(uint32_t tag) override {
        const std::lock_guard lock(pool_->mutex);
        pool_->queue.promote(tag);
    }
    size_t in_flight() const override { return in_flight_; }
    uint32_t depth() const override { return static_cast<uint32_t>(pool_->workers.size()); }
    const ReaderCounters& counters() const override { return counters_; }

  private:
    void stop() {
        {
            const std::lock_guard lock(pool_->mutex);
            pool_->stopping = true;
            pool_->queue.forget_queued();
        }
        pool_->queued.notify_all();
        for (auto& worker : pool_->workers) worker.join();
    }

    std::unique_ptr<Pool> pool_;
    ReaderCounters counters_;  // the caller's copy
    size_t in_flight_ = 0;
    pid_t process_;
};

const ReaderRegistration registration(
    "threads", "a pool of N threads that pread, 1 to 64 (default 4)",
    [](const ReaderOptions& options, const std::string& argument) {
        return make_threads(options, parse_count(argument, kDefaultThreads, kMaxThreads, "threads"), ::pread);
    });

}  // namespace

std::unique_ptr<Reader> make_threads(const ReaderOptions& options, uint32_t threads, PreadFunction pread) {
    return std::make_unique<Threads>(options, threads, pread);
}

}  // namespace moestream
