// mapped: the file mapping without MAP_POPULATE; the kernel's page cache is the cache. What is done at a route is
// the warmer's business (warmer.h).
#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "moestream/interpose.h"
#include "moestream/policy.h"
#include "pages.h"
#include "shards.h"
#include "warmer.h"

namespace moestream {
namespace {

constexpr const char* kDropAfterUse = "dontneed";

class MappedStore : public ShardedStore {
  public:
    MappedStore(const SlabIndex& index, const StoreOptions& options);

    void* region(uint32_t shard) override;
    void adopt(uint32_t shard, const Mapping& mapping) override;
    void load_dense() override;
    void set_capacities(std::span<const uint32_t>) override {}
    // With stock's reader nothing is done at a route, unless pages are dropped after it.
    bool streams() const override { return !idle_ || policy_ != nullptr; }

    bool route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) override;
    bool pending(uint32_t) const override { return false; }
    bool wait(uint32_t tensor) override;
    void speculate(std::span<const uint32_t> experts) override;
    bool demand_idle() const override { return true; }
    void end_step() override { finish_route(); }
    StoreCounters counters() const override { return counters_; }
    std::map<std::string, uint64_t> engagement() const override;

  private:
    void advise_slabs();
    void lock_exactly();
    void copy_resident();
    void collect(std::span<const uint32_t> experts, SlabKind kind);
    bool warm();
    void finish_route();
    void drop(uint32_t expert);

    std::unique_ptr<Warmer> warmer_;
    std::unique_ptr<Policy> policy_;    // `dontneed`: says what may stay; null: the kernel's business alone
    bool idle_ = false;
    std::vector<uint32_t> first_slab_;  // by tensor: the number of its slab 0
    std::vector<uint32_t> routed_;      // experts of the route whose matmuls run
    uint32_t routed_bank_ = kNone;
    std::vector<MappedSlab> slabs_;     // of the call being made
    std::vector<MappedSlab> in_use_;    // of the route whose matmuls run
    std::vector<std::pair<uint32_t, uint32_t>> named_;  // (tensor, expert) of each of slabs_
    uint64_t dropped_ = 0;
};

MappedStore::MappedStore(const SlabIndex& index, const StoreOptions& options) : ShardedStore(index, options) {
    uint32_t slabs = 0;
    for (const auto& tensor : index.tensors()) {
        first_slab_.push_back(slabs);
        slabs += tensor.count;
    }
    warmer_ = make_warmer(options.reader, {options.alignment, options.huge, slabs, options.fallback});
    idle_ = options.reader == "fault";
    if (options.policy.rfind(kDropAfterUse, 0) == 0) {
        PolicyShape shape{index.experts(), index.experts(), {}, static_cast<uint32_t>(index.banks().size()), {}};
        for (uint32_t e = 0; e < index.experts(); ++e) shape.bank_of.push_back(index.bank_of(e));
        policy_ = make_policy(options.policy, shape);
    } else if (options.policy != "none") {
        throw Error(ErrorKind::usage, "the kernel's page cache decides what stays in a mapped store, not " +
                                          options.policy);
    }
    open_shards(warmer_->wants_direct());
}

void* MappedStore::region(uint32_t shard) {
    auto& region = regions_[shard];
    if (region.base != nullptr) return region.base;
    void* base = mmap(nullptr, region.bytes, PROT_READ, MAP_SHARED, region.buffered_fd, 0);
    if (base == MAP_FAILED) {
        const int error = errno;
        fail(error, index_.shards()[shard].path + " cannot be mapped (" + std::strerror(error) +
                        "): use the arena store");
        return MAP_FAILED;
    }
    region.base = static_cast<char*>(base);
    register_region(region.base, region.bytes);
    return base;
}

void MappedStore::adopt(uint32_t shard, const Mapping& mapping) {
    // llama.cpp unmaps what it has mapped by itself before the store is told.
    if (options_.reader.find("memcpy") == 0 && options_.reader.find("background") != std::string::npos) {
        throw Error(ErrorKind::unsupported, "memcpy in the background needs a mapping of our own, and no import slot "
                                            "of mmap was found: leave out background");
    }
    use(shard, mapping);
}

void MappedStore::load_dense() {
    if (options_.dense == "anon") copy_resident();
    if (options_.dense == "mlock") lock_exactly();
    advise_slabs();
}

void MappedStore::advise_slabs() {
    if (options_.advice == "normal") return;
    const int advice = options_.advice == "random" ? MADV_RANDOM : MADV_SEQUENTIAL;
    for (const auto& tensor : index_.tensors()) {
        const auto& region = regions_[tensor.shard];
        if (region.base == nullptr) continue;
        const Pages pages = around(region.base + tensor.offset, tensor.slab_bytes * tensor.count);
        if (madvise(pages.begin, pages.bytes, advice) != 0) {
            throw Error(ErrorKind::unsupported, "the kernel refuses advice " + options_.advice + " on " +
                                                    index_.shards()[tensor.shard].path + ": " + std::strerror(errno));
        }
    }
}

// Locking faults pages in, and each fault would read ahead (by megabytes, on some boxes) into slabs that are not
// wanted: enough to fill a cgroup faster than it reclaims. So the ranges are asked for by name first.
void MappedStore::lock_exactly() {
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& region = regions_[s];
        if (region.base == nullptr || region.locked) continue;
        madvise(region.base + region.begin, region.end - region.begin, MADV_RANDOM);
        for (const auto& range : resident(s)) {
            MappedSlab wanted;
            wanted.address = region.base + range.begin;
            wanted.bytes = range.end - range.begin;
            advise_willneed(wanted);
            counters_.dense_bytes += range.end - range.begin;
        }
    }
    lock_resident();
    for (const auto& region : regions_) {
        if (region.base != nullptr) madvise(region.base + region.begin, region.end - region.begin, MADV_NORMAL);
    }
}

// Dense bytes in memory of our own at the same addresses; the slabs' movable pages stay file mappings.
void MappedStore::copy_resident() {
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        if (regions_[s].base == nullptr || regions_[s].loaded) continue;
        for (const auto& range : resident(s)) {
            reserve(range.end - range.begin, kPage, regions_[s].base + range.begin);
        }
    }
    const auto reader = make_reader("sync", ReaderOptions{});
    read_resident(*reader);
}

// The slabs of these experts of one bank, in the order the matmuls use them, as the warmer takes them.
void MappedStore::collect(std::span<const uint32_t> experts, SlabKind kind) {
    slabs_.clear();
    named_.clear();
    if (experts.empty()) return;
    const auto& tensors = index_.banks()[index_.bank_of(experts.front())].tensors;
    for (uint32_t slot = 0; slot < tensors.size(); ++slot) {
        const uint32_t t = tensors[slot];
        const auto& tensor = index_.tensors()[t];
        const auto& region = regions_[tensor.shard];
        for (const uint32_t expert : experts) {
            const uint32_t id = index_.id_of(expert);
            const uint64_t offset = index_.slab_offset(t, id);
            const int direct = region.fd == region.buffered_fd ? -1 : region.fd;
            slabs_.push_back({region.base + offset, region.buffered_fd, direct, offset, tensor.slab_bytes,
                              first_slab_[t] + id});
            named_.emplace_back(t, expert);
            if (recorder_ != nullptr) recorder_->issued(expert, slot, kind, tensor.slab_bytes, now_ns());
        }
    }
}

bool MappedStore::warm() {
    if (slabs_.empty()) return true;
    const auto outcome = warmer_->warm(slabs_);
    counters_.bytes += outcome.bytes;
    if (outcome.error == 0) return true;
    const auto& tensor = index_.tensors()[named_[outcome.slab].first];
    fail(outcome.error, index_.shards()[tensor.shard].path + " at byte " +
                            std::to_string(slabs_[outcome.slab].offset) + " (" + tensor.name + ", expert " +
                            std::to_string(index_.id_of(named_[outcome.slab].second)) + "): " +
                            (outcome.error == ENODATA ? "the file ends early" : std::strerror(outcome.error)));
    return false;
}

bool MappedStore::route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) {
    const uint64_t start = now_ns();
    finish_route();
    routed_bank_ = bank;
    for (const auto& routed : experts) {
        routed_.push_back(routed.expert);
        if (policy_ != nullptr) policy_->use(routed.expert, {token, tokens, routed.count});
    }
    bool good = true;
    if (!idle_) {
        collect(routed_, SlabKind::advised);
        good = warm();
        in_use_ = slabs_;
    }
    counters_.memory_ns += now_ns() - start;
    return good && !failure_;
}

bool MappedStore::wait(uint32_t tensor) {
    if (recorder_ != nullptr && index_.tensors()[tensor].bank == routed_bank_) {
        const auto& tensors = index_.banks()[routed_bank_].tensors;
        for (uint32_t slot = 0; slot < tensors.size(); ++slot) {
            if (tensors[slot] != tensor) continue;
            for (const uint32_t expert : routed_) recorder_->needed(expert, slot, now_ns(), 0);
        }
    }
    return !failure_;
}

// A wish of the engine's own (the next layer of a long prompt) is none that a mapped store was asked to grant.
void MappedStore::speculate(std::span<const uint32_t> experts) {
    if (!options_.speculative || idle_ || experts.empty() || failure_) return;
    const uint64_t start = now_ns();
    collect(experts, SlabKind::speculative);
    counters_.speculative_issued += experts.size();
    warm();
    counters_.memory_ns += now_ns() - start;
}

// The matmuls of the last route are over: what was laid over the file goes, and what is not to stay.
void MappedStore::finish_route() {
    const int error = warmer_->done(in_use_);
    if (error != 0) fail(error, std::string("mapping the file again: ") + std::strerror(error));
    if (policy_ != nullptr) {
        for (const uint32_t expert : routed_) {
            if (!policy_->keep(expert)) drop(expert);
        }
    }
    in_use_.clear();
    routed_.clear();
    routed_bank_ = kNone;
}

void MappedStore::drop(uint32_t expert) {
    for (const uint32_t t : index_.banks()[index_.bank_of(expert)].tensors) {
        const uint64_t bytes = geometry_.movable_bytes(t);
        if (bytes == 0) continue;
        const uint64_t offset = geometry_.movable_offset(t, index_.id_of(expert));
        const auto& region = regions_[index_.tensors()[t].shard];
        // The page cache gives up only what nobody maps.
        int error = madvise(region.base + offset, bytes, MADV_DONTNEED) != 0 ? errno : 0;
        if (error == 0) {
            error = posix_fadvise(region.buffered_fd, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                                  POSIX_FADV_DONTNEED);
        }
        if (error != 0) return fail(error, std::string("dropping an expert's pages: ") + std::strerror(error));
        dropped_ += bytes;
    }
}

std::map<std::string, uint64_t> MappedStore::engagement() const {
    auto counts = warmer_->counts();
    if (policy_ != nullptr) counts["bytes dropped after use"] = dropped_;
    return counts;
}

const StoreRegistration registration(
    "mapped", "the file mapping without MAP_POPULATE; the page cache is the cache",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<MappedStore>(index, options);
    });

}  // namespace
}  // namespace moestream
