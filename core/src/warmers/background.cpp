// background:N: worker threads do what a warmer does and the decode goes on at once. A slab that is still on its way when
// its matmul begins is brought by the matmul's own faults, so nothing is ever wrong, only late.
//
// The queue is bounded; when it is full the slab that has waited longest makes room: its matmul is the likeliest to be
// over. Failures come out of the next call.
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "../stores/warmer.h"
#include "workers.h"

namespace moestream {
namespace {

constexpr std::string_view kMark = "+background:";
constexpr size_t kQueue = 4096;  // slabs
constexpr uint32_t kMostWorkers = 16;

// What the decode and the workers share, under `mutex`.
struct Shared {
    explicit Shared(std::vector<std::unique_ptr<Warmer>> warmers) : warmers(std::move(warmers)), ring(kQueue) {}

    void push(const MappedSlab& slab) {
        if (waiting == ring.size()) {
            pop();
            ++left_out;
        }
        ring[(first + waiting++) % ring.size()] = slab;
    }
    MappedSlab pop() {
        const MappedSlab slab = ring[first];
        first = (first + 1) % ring.size();
        --waiting;
        return slab;
    }
    void serve(uint32_t thread) {
        std::unique_lock lock(mutex);
        while (true) {
            queued.wait(lock, [this] { return stopping || waiting > 0; });
            if (stopping) return;
            MappedSlab slab = pop();
            ++at_work;
            lock.unlock();
            const auto trouble = warmers[thread]->warm({&slab, 1});
            lock.lock();
            if (trouble.error == 0) ++asked;
            if (trouble.error != 0 && first_trouble.error == 0) first_trouble = trouble;
            if (--at_work == 0) idle.notify_all();
        }
    }
    void stop() {
        {
            const std::lock_guard lock(mutex);
            stopping = true;
        }
        queued.notify_all();
    }

    mutable std::mutex mutex;
    std::condition_variable queued, idle;
    std::vector<std::unique_ptr<Warmer>> warmers;  // one a worker: none of them is made for several threads
    std::vector<MappedSlab> ring;
    size_t first = 0, waiting = 0;
    uint32_t at_work = 0;
    bool stopping = false;
    Warmer::Trouble first_trouble;
    uint64_t asked = 0, left_out = 0;
};

class Background : public Warmer {
  public:
    explicit Background(std::unique_ptr<Shared> shared, uint32_t workers) : workers_(std::move(shared), workers) {}

    void open(const std::string& path, int fd, int direct_fd) override {
        for (const auto& warmer : workers_->warmers) warmer->open(path, fd, direct_fd);
    }
    Trouble warm(std::span<MappedSlab> slabs) override {
        {
            const std::lock_guard lock(workers_->mutex);
            if (workers_->first_trouble.error != 0) return std::exchange(workers_->first_trouble, {});
            for (auto& slab : slabs) {
                workers_->push(slab);
                slab.asked = slab.bytes;
            }
        }
        workers_->queued.notify_all();
        return {};
    }
    void settle() override {
        std::unique_lock lock(workers_->mutex);
        workers_->waiting = 0;
        workers_->idle.wait(lock, [this] { return workers_->at_work == 0; });
        workers_->first_trouble = {};
    }
    bool asynchronous() const override { return true; }
    std::map<std::string, uint64_t> counts() const override {
        std::map<std::string, uint64_t> counts;
        for (const auto& warmer : workers_->warmers) {
            for (const auto& [name, count] : warmer->counts()) counts[name] += count;
        }
        const std::lock_guard lock(workers_->mutex);
        counts["slabs asked for in the background"] = workers_->asked;
        counts["slabs left out of a full queue"] = workers_->left_out;
        return counts;
    }

  private:
    Workers<Shared> workers_;
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
    const uint32_t workers = parse_workers(std::string_view(text).substr(mark + kMark.size()));
    std::vector<std::unique_ptr<Warmer>> warmers;
    for (uint32_t n = 0; n < workers; ++n) {
        warmers.push_back(factory(options, argument));
        if (warmers.back()->wants_direct()) {
            throw Error(ErrorKind::refused, "tiered changes what lies under a matmul and so cannot run in the "
                                            "background: leave out background, or use mapped+pread");
        }
    }
    return std::make_unique<Background>(std::make_unique<Shared>(std::move(warmers)), workers);
}

}  // namespace moestream
