// background:N: worker threads do what a warmer does and the decode goes on at once. A slab that is still on its way when
// its matmul begins is brought by the matmul's own faults, so nothing is ever wrong, only late.
#include <charconv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "../stores/warmer.h"
#include "moestream/error.h"

namespace moestream {
namespace {

constexpr std::string_view kMark = "+background:";
constexpr size_t kQueue = 4096;  // slabs waiting; more are left to the faults
constexpr uint32_t kMostWorkers = 16;

class Background : public Warmer {
  public:
    // One warmer a worker: none of them is made for several threads.
    explicit Background(std::vector<std::unique_ptr<Warmer>> warmers) : warmers_(std::move(warmers)) {
        for (auto& warmer : warmers_) threads_.emplace_back([this, &warmer] { serve(*warmer); });
    }
    ~Background() override {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        ready_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    Outcome warm(std::span<const MappedSlab> slabs) override {
        Outcome outcome;
        const std::lock_guard lock(mutex_);
        if (error_ != 0) {
            // The slab it belongs to may be of a route long gone: the route at hand stands for it.
            outcome.error = std::exchange(error_, 0);
            return outcome;
        }
        for (const auto& slab : slabs) {
            if (waiting_.size() == kQueue) {
                ++left_out_;
                continue;
            }
            outcome.bytes += slab.bytes;
            waiting_.push_back(slab);
        }
        ready_.notify_all();
        return outcome;
    }
    std::map<std::string, uint64_t> counts() const override {
        const std::lock_guard lock(mutex_);
        return {{"slabs asked for in the background", asked_}, {"slabs left out", left_out_}};
    }

  private:
    void serve(Warmer& warmer) {
        std::unique_lock lock(mutex_);
        while (true) {
            ready_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
            if (stop_) return;
            const MappedSlab slab = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            const Outcome outcome = warmer.warm({&slab, 1});
            lock.lock();
            ++asked_;
            if (outcome.error != 0) error_ = outcome.error;
        }
    }

    mutable std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<MappedSlab> waiting_;
    bool stop_ = false;
    int error_ = 0;
    uint64_t asked_ = 0, left_out_ = 0;
    std::vector<std::unique_ptr<Warmer>> warmers_;
    std::vector<std::thread> threads_;
};

uint32_t parse_workers(std::string_view text) {
    uint32_t workers = 0;
    const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), workers);
    if (error != std::errc() || at != text.data() + text.size() || workers < 1 || workers > kMostWorkers) {
        throw Error(ErrorKind::usage, "background:N takes 1 to 16 worker threads, not '" + std::string(text) + "'");
    }
    return workers;
}

}  // namespace

std::unique_ptr<Warmer> make_warmer(const std::string& text, const WarmerOptions& options) {
    const auto mark = text.find(kMark);
    std::string argument;
    const auto& factory = Registry<WarmerFactory>::instance().find(text.substr(0, mark), argument);
    if (mark == std::string::npos) return factory(options, argument);
    std::vector<std::unique_ptr<Warmer>> warmers;
    for (uint32_t n = parse_workers(std::string_view(text).substr(mark + kMark.size())); n > 0; --n) {
        warmers.push_back(factory(options, argument));
        if (warmers.back()->wants_direct()) {
            throw Error(ErrorKind::usage, "tiered changes what lies under a matmul: it cannot run in the background");
        }
    }
    return std::make_unique<Background>(std::move(warmers));
}

}  // namespace moestream
