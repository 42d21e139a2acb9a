// mapped: the file mapping without MAP_POPULATE; the kernel's page cache is the cache. What is done at a route is
// the warmer's business (warmer.h).
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
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
    void end_step() override;
    void clear_failure() override;
    StoreCounters counters() const override { return counters_; }
    std::map<std::string, uint64_t> engagement() const override;

  private:
    void advise_slabs();
    void copy_resident();
    void collect(std::span<const uint32_t> experts);
    const MappedSlab* cut_off() const;
    bool ask(std::span<const uint32_t> experts, SlabKind kind);
    bool refuse(int error, const MappedSlab& slab);
    void count_wishes(uint32_t bank);
    void finish_route(uint32_t next_bank);
    void drop_unkept(uint32_t bank);
    int drop(uint32_t tensor, uint32_t begin_id, uint32_t end_id);

    std::unique_ptr<Warmer> warmer_;
    std::unique_ptr<Policy> policy_;    // `dontneed`: says what may stay; null: the kernel's business alone
    bool idle_ = false;
    std::vector<uint32_t> first_slab_;  // by tensor: the number of its slab 0
    std::vector<MappedSlab> slabs_;     // of the call being made
    std::vector<std::pair<uint32_t, uint32_t>> named_;  // (expert, slot) of each of them
    std::vector<uint32_t> routed_;      // experts of the route whose matmuls run
    uint32_t routed_bank_ = kNone;
    std::vector<MappedSlab> in_use_;    // slabs of them, and what of their bank was asked for early
    std::vector<uint32_t> wished_;      // experts asked for early, of the bank to be routed next
    std::vector<MappedSlab> early_;     // slabs of them
    std::vector<bool> touched_;         // by expert: asked for since its pages were dropped
    std::vector<bool> kept_;            // by id, of the bank being dropped
    uint64_t dropped_ = 0;
    uint64_t advised_ = 0;
};

int madvise_value(const std::string& advice) {
    return advice == "random" ? MADV_RANDOM : advice == "sequential" ? MADV_SEQUENTIAL : MADV_NORMAL;
}

// Says each line once: several threads' scratch may lack the same.
std::function<void(const std::string&)> once(std::function<void(const std::string&)> say) {
    return [say = std::move(say), said = std::make_shared<std::set<std::string>>()](const std::string& line) {
        if (said->insert(line).second && say) say(line);
    };
}

MappedStore::MappedStore(const SlabIndex& index, const StoreOptions& options)
    : ShardedStore(index, options), idle_(options.reader == "fault"), touched_(index.experts()) {
    uint32_t slabs = 0;
    for (const auto& tensor : index.tensors()) {
        first_slab_.push_back(slabs);
        slabs += tensor.count;
    }
    warmer_ = make_warmer(options.reader, {options.alignment, options.huge, madvise_value(options.advice), slabs,
                                           once(options.fallback)});
    if (options.policy.rfind(kDropAfterUse, 0) == 0) {
        PolicyShape shape{index.experts(), index.experts(), {}, static_cast<uint32_t>(index.banks().size()), {}};
        for (uint32_t e = 0; e < index.experts(); ++e) shape.bank_of.push_back(index.bank_of(e));
        policy_ = make_policy(options.policy, shape);
    } else if (options.policy != "none") {
        throw Error(ErrorKind::usage, "the kernel's page cache decides what stays in a mapped store, not " +
                                          options.policy);
    }
    open_shards(warmer_->wants_direct());
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& region = regions_[s];
        // What a read brings beside its slab would come when the slab has been dropped already.
        if (policy_ != nullptr) {
            require_advice(s, "POSIX_FADV_RANDOM", posix_fadvise(region.buffered_fd, 0, 0, POSIX_FADV_RANDOM));
        }
        warmer_->open(index.shards()[s].path, region.buffered_fd, region.fd == region.buffered_fd ? -1 : region.fd);
    }
    uint32_t widest = 0;
    for (const auto& bank : index.banks()) widest = std::max(widest, bank.count);
    kept_.reserve(widest);
    routed_.reserve(widest);
    wished_.reserve(widest);
    for (auto* slabs_of : {&slabs_, &early_}) slabs_of->reserve(size_t{widest} * kSlots);
    in_use_.reserve(size_t{widest} * kSlots * 2);
    named_.reserve(size_t{widest} * kSlots);
}

void* MappedStore::region(uint32_t shard) {
    auto& region = regions_[shard];
    if (region.base != nullptr) return region.base;
    void* base = mmap(nullptr, region.bytes, PROT_READ, MAP_SHARED, region.buffered_fd, 0);
    if (base == MAP_FAILED) {
        throw Error(ErrorKind::refused,
                    index_.shards()[shard].path + " cannot be mapped (" + std::strerror(errno) + "): use arena");
    }
    region.base = static_cast<char*>(base);
    register_region(region.base, region.bytes);
    watch(shard);
    return base;
}

void MappedStore::adopt(uint32_t shard, const Mapping& mapping) {
    // llama.cpp unmaps what it has mapped by itself before the store is told.
    if (options_.reader.find("memcpy") == 0 && options_.reader.find("background") != std::string::npos) {
        throw Error(ErrorKind::unsupported, "memcpy in the background needs a mapping of our own, and no import slot "
                                            "of mmap was found: leave out background");
    }
    use(shard, mapping);
    watch(shard);
}

void MappedStore::load_dense() {
    if (options_.dense == "anon") copy_resident();
    if (options_.dense == "mlock") lock_exactly();
    advise_slabs();
}

void MappedStore::advise_slabs() {
    if (options_.advice == "normal") return;
    advised_ = 0;
    for (const auto& tensor : index_.tensors()) {
        const auto& region = regions_[tensor.shard];
        if (region.base == nullptr) continue;
        const Pages pages = around(region.base + tensor.offset, tensor.slab_bytes * tensor.count);
        if (madvise(pages.begin, pages.bytes, madvise_value(options_.advice)) != 0) {
            throw Error(ErrorKind::unsupported, "the kernel refuses advice " + options_.advice + " on " +
                                                    index_.shards()[tensor.shard].path + " (" + std::strerror(errno) +
                                                    "): leave out " + options_.advice);
        }
        advised_ += tensor.slab_bytes * tensor.count;
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
void MappedStore::collect(std::span<const uint32_t> experts) {
    slabs_.clear();
    named_.clear();
    const auto& tensors = index_.banks()[index_.bank_of(experts.front())].tensors;
    for (uint32_t slot = 0; slot < tensors.size(); ++slot) {
        const uint32_t t = tensors[slot];
        const auto& tensor = index_.tensors()[t];
        const auto& region = regions_[tensor.shard];
        const int direct = region.fd == region.buffered_fd ? -1 : region.fd;
        for (const uint32_t expert : experts) {
            const uint32_t id = index_.id_of(expert);
            uint64_t offset = index_.slab_offset(t, id);
            uint64_t bytes = tensor.slab_bytes;
            if (options_.dense == "anon") {  // its other pages are memory of our own
                offset = geometry_.movable_offset(t, id);
                bytes = geometry_.movable_bytes(t);
                if (bytes == 0) continue;
            }
            slabs_.push_back({region.base + offset, region.buffered_fd, direct, offset, bytes, first_slab_[t] + id});
            named_.emplace_back(expert, slot);
        }
    }
}

// The first slab that its file has no bytes for any more: the error names what the route asked for.
const MappedSlab* MappedStore::cut_off() const {
    int fd = -1;
    struct stat status {};
    for (const auto& slab : slabs_) {
        if (slab.fd != fd && fstat(slab.fd, &status) != 0) status.st_size = 0;
        fd = slab.fd;
        if (static_cast<uint64_t>(status.st_size) < slab.offset + slab.bytes) return &slab;
    }
    return nullptr;
}

bool MappedStore::refuse(int error, const MappedSlab& slab) {
    const auto after = std::upper_bound(first_slab_.begin(), first_slab_.end(), slab.number);
    const auto t = static_cast<uint32_t>(after - first_slab_.begin() - 1);
    const auto& tensor = index_.tensors()[t];
    fail(error, index_.shards()[tensor.shard].path + " at byte " + std::to_string(slab.offset) + " (" + tensor.name +
                    ", expert " + std::to_string(slab.number - first_slab_[t]) + "): " +
                    (error == ENODATA ? "the file ends early" : std::strerror(error)));
    return false;
}

bool MappedStore::ask(std::span<const uint32_t> experts, SlabKind kind) {
    const uint64_t start = now_ns();
    collect(experts);
    if (const MappedSlab* slab = cut_off()) return refuse(ENODATA, *slab);
    const auto trouble = warmer_->warm(slabs_);
    const uint64_t end = now_ns();
    for (size_t i = 0; i < slabs_.size(); ++i) {
        counters_.bytes += slabs_[i].asked;
        if (recorder_ == nullptr || slabs_[i].asked == 0) continue;
        const auto [expert, slot] = named_[i];
        recorder_->issued(expert, slot, kind, slabs_[i].asked, start);
        if (!warmer_->asynchronous()) recorder_->ready(expert, slot, end);
    }
    for (const uint32_t expert : experts) touched_[expert] = true;
    // A reader that returns with the bytes was waited for; one that only asked was not.
    (kind == SlabKind::demand ? counters_.stall_ns : counters_.memory_ns) += end - start;
    return trouble.error == 0 || refuse(trouble.error, trouble.slab);
}

bool MappedStore::route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) {
    finish_route(bank);
    routed_bank_ = bank;
    for (const auto& routed : experts) {
        routed_.push_back(routed.expert);
        touched_[routed.expert] = true;
        if (policy_ != nullptr) policy_->use(routed.expert, {token, tokens, routed.count});
    }
    count_wishes(bank);
    if (idle_ || failure_ || routed_.empty()) return !failure_;
    const bool good = ask(routed_, warmer_->asynchronous() ? SlabKind::advised : SlabKind::demand);
    in_use_.insert(in_use_.end(), slabs_.begin(), slabs_.end());
    return good;
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

// Only where a predictor is set: the engine's own wish (all of the next layer, in a long prompt) is none that a mapped
// store without one was asked to grant, and a warmer that is waited for would only hold up this layer's matmuls.
void MappedStore::speculate(std::span<const uint32_t> experts) {
    if (!options_.speculative || idle_ || experts.empty() || failure_) return;
    // A predictor that looks further ahead names those layers again when they are nearer.
    const uint32_t bank = index_.bank_of(experts.front());
    const auto later = std::find_if(experts.begin(), experts.end(),
                                    [&](uint32_t expert) { return index_.bank_of(expert) != bank; });
    experts = experts.first(static_cast<size_t>(later - experts.begin()));
    const uint32_t count = index_.banks()[bank].count;
    if (experts.size() == count && !warmer_->asynchronous()) return;
    wished_.assign(experts.begin(), experts.end());
    counters_.speculative_issued += experts.size();
    ask(experts, SlabKind::speculative);
    early_.assign(slabs_.begin(), slabs_.end());
}

// What the wishes were worth, now that their bank is routed, or another one.
void MappedStore::count_wishes(uint32_t bank) {
    for (const uint32_t expert : wished_) {
        const bool used = std::binary_search(routed_.begin(), routed_.end(), expert);
        counters_.speculative_used += used;
        if (used) continue;
        for (const uint32_t t : index_.banks()[index_.bank_of(expert)].tensors) {
            counters_.speculative_wasted_bytes += index_.tensors()[t].slab_bytes;
        }
    }
    // Pages of a bank that was not routed after all would wait for its next route.
    const uint32_t wished = wished_.empty() ? bank : index_.bank_of(wished_.front());
    if (policy_ != nullptr && wished != bank) drop_unkept(wished);
    wished_.clear();
}

// The matmuls of the last route are over: what was laid over the file goes, and what is not to stay. What was asked for
// early lives on when its bank is the next.
void MappedStore::finish_route(uint32_t next_bank) {
    int error = warmer_->done(in_use_);
    in_use_.clear();
    if (!wished_.empty() && index_.bank_of(wished_.front()) == next_bank) {
        in_use_.assign(early_.begin(), early_.end());
    } else if (error == 0) {
        error = warmer_->done(early_);
    }
    early_.clear();
    if (error != 0) fail(error, std::string("mapping the file again: ") + std::strerror(error));
    if (policy_ != nullptr && routed_bank_ != kNone) drop_unkept(routed_bank_);
    routed_.clear();
    routed_bank_ = kNone;
}

void MappedStore::end_step() {
    // A wish for the first bank of the next step is not over.
    std::vector<MappedSlab> early;
    early.swap(early_);
    finish_route(kNone);
    early_.swap(early);
}

void MappedStore::clear_failure() {
    warmer_->settle();
    finish_route(kNone);
    wished_.clear();
    failure_.reset();
}

// Everything of the bank but the experts that the policy keeps: also what the kernel has read beside the routed slabs,
// and what was kept until a hotter one came.
void MappedStore::drop_unkept(uint32_t bank) {
    const auto& shape = index_.banks()[bank];
    kept_.assign(shape.count, false);
    for (uint32_t id = 0; id < shape.count; ++id) kept_[id] = policy_->keep(shape.first_expert + id);
    for (const uint32_t t : shape.tensors) {
        for (uint32_t id = 0; id < shape.count;) {
            uint32_t end = id;
            while (end < shape.count && !kept_[end]) ++end;
            const int error = end > id ? drop(t, id, end) : 0;
            if (error != 0) return fail(error, std::string("dropping experts' pages: ") + std::strerror(error));
            id = end + 1;
        }
    }
    for (uint32_t id = 0; id < shape.count; ++id) {
        if (!kept_[id]) touched_[shape.first_expert + id] = false;
    }
}

// The whole pages of consecutive slabs. The page cache gives up only what nobody maps, so they are unmapped first; of
// pages that are dense memory of our own, or locked, nothing may be.
int MappedStore::drop(uint32_t tensor, uint32_t begin_id, uint32_t end_id) {
    const auto& shape = index_.tensors()[tensor];
    const auto& region = regions_[shape.shard];
    const uint64_t begin = (index_.slab_offset(tensor, begin_id) + kPage - 1) / kPage * kPage;
    const uint64_t end = index_.slab_offset(tensor, end_id) / kPage * kPage;
    if (begin >= end) return 0;
    const bool file_alone = options_.dense == "mapped";
    if (file_alone && madvise(region.base + begin, end - begin, MADV_DONTNEED) != 0) return errno;
    const uint64_t movable = geometry_.movable_bytes(tensor);
    for (uint32_t id = begin_id; id < end_id && movable > 0; ++id) {
        if (!touched_[index_.banks()[shape.bank].first_expert + id]) continue;
        dropped_ += movable;
        if (file_alone) continue;
        if (madvise(region.base + geometry_.movable_offset(tensor, id), movable, MADV_DONTNEED) != 0) return errno;
    }
    return posix_fadvise(region.buffered_fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                         POSIX_FADV_DONTNEED);
}

std::map<std::string, uint64_t> MappedStore::engagement() const {
    auto counts = warmer_->counts();
    if (policy_ != nullptr) counts["bytes dropped after use"] = dropped_;
    if (advised_ > 0) counts["bytes of the mapping advised"] = advised_;
    return counts;
}

const StoreRegistration registration(
    "mapped", "the file mapping without MAP_POPULATE; the page cache is the cache",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<MappedStore>(index, options);
    });

}  // namespace
}  // namespace moestream
