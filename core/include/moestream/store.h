// A store is where slabs live while the model runs, and what happens to them at a route.
//
// Who owns what. A store owns one *region* of address space per shard, as long as the shard; llama.cpp's tensors
// point into it and keep one permanent address each. The store also owns the descriptors, the reader and the cache.
// It must outlive the llama.cpp model that was loaded over it.
//
// Who calls what, in this order:
//   region()          for each shard while llama.cpp loads (or adopt(), when llama.cpp has mapped it by itself)
//   load_dense()      after each of them: reads everything of it that is not a movable page of a slab
//   set_capacities()  once the context exists and the budget is known (stores without a cache ignore it)
//   route()           when a layer's router has chosen; starts every missing slab in the order the matmuls need them
//   wait()            before a matmul on one expert tensor: returns when the routed slabs of that tensor are there
//   speculate()       when no demand is in flight: experts that may be wanted soon
// The last three are called from the thread that runs the decode, allocate nothing and throw nothing; a failed read
// makes them return false and failure() says which.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moestream/cache.h"
#include "moestream/interpose.h"
#include "moestream/reader.h"
#include "moestream/recorder.h"
#include "moestream/seeds.h"
#include "moestream/slab_index.h"

namespace moestream {

struct StoreOptions {
    std::string reader;  // "uring:24", "threads:4", "sync"; for `mapped`: "fault", "willneed", ...
    std::string policy;  // "lru", "lfu-decay:16", ...
    std::string dense;   // "mapped", "mlock", "anon"
    bool direct = true;  // O_DIRECT where the file system takes it
    bool keep_cached = false;  // without `direct`: slabs that were read stay in the page cache
    std::string advice = "normal";  // `mapped`: what the kernel is told of the slabs' mapping: normal, random, sequential
    std::string pages = "recycle";  // `arena`: where pages come from: recycle, fresh, populate, thp
    uint64_t max_mappings = 65530;  // `arena`: of this process, by the kernel (vm.max_map_count)
    bool closed = false;  // `arena`: what has no pages may not be touched, and so is not committed (see pages.h)
    uint64_t alignment = kPage;     // of what is read into (scratch, staging, the region modulo this), bytes
    bool huge = false;              // scratch or staging in huge pages
    bool speculative = false;       // a predictor is set (`mapped` then warms what it names)
    std::string copy_dir;           // `shared`: where its copy of the file is made
    Seeds seeds;
    std::function<void(const std::string&)> fallback;  // told each thing that is not as asked, one line each
    std::function<void(uint64_t done, uint64_t total)> progress;  // bytes of load_dense
};

struct StoreCounters {
    uint64_t hits = 0;
    uint64_t misses = 0;
    uint64_t bytes = 0;          // of slabs read (or asked for, where the kernel reads)
    uint64_t dense_bytes = 0;    // read by load_dense
    uint64_t stall_ns = 0;       // asleep in wait() until a slab was there
    uint64_t memory_ns = 0;      // moving pages, submitting reads, deciding
    uint64_t speculative_issued = 0;
    uint64_t speculative_used = 0;
    uint64_t speculative_wasted_bytes = 0;
};

struct Failure {
    int error = 0;  // errno; 0: `what` alone says it
    std::string what;
    // Where in a shard, if it is no expert's and `what` names no tensor.
    std::optional<std::pair<uint32_t, uint64_t>> dense_at = std::nullopt;
};

class Store {
  public:
    explicit Store(const SlabIndex& index) : index_(index) {}
    virtual ~Store() = default;
    virtual void* region(uint32_t shard) = 0;
    // llama.cpp has mapped the shard itself (no import slot): lay the store over that mapping.
    virtual void adopt(uint32_t shard, const Mapping& mapping) = 0;
    virtual void load_dense() = 0;
    virtual void set_capacities(std::span<const uint32_t> capacities) = 0;
    // Another budget while the model is loaded, between steps, never above the first: a smaller one gives pages back to
    // the system at once, a larger one takes them as they are needed. Returns the capacities it came to; stores without
    // a cache of their own return none. Throws Error.
    virtual std::vector<uint32_t> resize(std::span<const uint32_t>) { return {}; }
    // Most bytes a store whose memory grows past its capacities may take before it stops itself; without: no limit.
    virtual void limit_growth(uint64_t) {}
    // False: nothing happens at a route, so the graph need not be cut there.
    virtual bool streams() const = 0;
    virtual bool route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) = 0;
    // Is a routed slab of this tensor still on its way?
    virtual bool pending(uint32_t tensor) const = 0;
    virtual bool wait(uint32_t tensor) = 0;
    virtual void speculate(std::span<const uint32_t> experts) = 0;
    // Nothing routed is in flight: the disk would idle.
    virtual bool demand_idle() const = 0;
    virtual StoreCounters counters() const = 0;
    virtual void begin_step() {}
    // The step is over: nothing of it is needed any more until the next route.
    virtual void end_step() {}
    // How often each thing a mechanism promises was done ("pages moved", "advice calls"): what shows that it engaged.
    virtual std::map<std::string, uint64_t> engagement() const { return {}; }
    // The first failure, once; cleared by clear_failure(), unless bytes of a mapping are lost for good.
    virtual const std::optional<Failure>& failure() const = 0;
    virtual void clear_failure() = 0;

    struct Place {
        uint32_t tensor = kNone;
        uint32_t bank = kNone;
    };
    // The expert tensor at this address, or kNone: how the hook recognises our matmuls.
    virtual Place place(const void* address) const = 0;

    // Where slab events go while a trace is recorded; null: nowhere.
    void record_to(Recorder* recorder) { recorder_ = recorder; }

  protected:
    const SlabIndex& index_;
    Recorder* recorder_ = nullptr;
};

using StoreFactory = std::function<std::unique_ptr<Store>(const SlabIndex&, const StoreOptions&)>;
using StoreRegistration = Registration<StoreFactory>;
// "resident", "mapped", "arena". Throws Error.
std::unique_ptr<Store> make_store(std::string_view text, const SlabIndex& index, const StoreOptions& options);

}  // namespace moestream
