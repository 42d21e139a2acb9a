#include "copying.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "moestream/interpose.h"
#include "pages.h"

namespace moestream {
namespace {

constexpr uint32_t kMostStaged = 64;

std::string megabytes(uint64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

}  // namespace

CopyingStore::CopyingStore(const SlabIndex& index, const StoreOptions& options)
    : ShardedStore(index, options), reader_(make_reader(options.reader, ReaderOptions{})),
      reading_(size_t{index.experts()} * kSlots), there_(size_t{index.experts()} * kSlots),
      written_(size_t{index.experts()} * kSlots) {
    if (options.dense == "anon") {
        throw Error(ErrorKind::usage, "its dense bytes stay in the file mapping: use dense mapped or mlock");
    }
    open_shards(options_.direct);
    uint64_t largest = kPage;
    for (uint32_t t = 0; t < index.tensors().size(); ++t) largest = std::max(largest, geometry_.movable_bytes(t));
    const uint32_t places = std::min(reader_->depth(), kMostStaged);
    if (places < reader_->depth()) {
        options_.fallback("at most " + std::to_string(places) + " slabs are on their way at once, not " +
                          std::to_string(reader_->depth()) + ": each has a place in memory between disk and mapping");
    }
    staging_ = std::make_unique<Buffers>(places, largest, options.alignment, options.huge, options_.fallback);
    tag_at_.resize(places, kNone);
    for (uint32_t place = places; place-- > 0;) free_.push_back(place);
}

// NORESERVE: it will hardly be written as a whole, and must not be charged as if.
void CopyingStore::map(uint32_t shard, void* at, uint64_t begin, uint64_t end) {
    const int flags = mapping_kind() | MAP_NORESERVE | (at != nullptr ? MAP_FIXED : 0);
    void* base = mmap(at, end - begin, PROT_READ | PROT_WRITE, flags, mapped_fd(shard), static_cast<off_t>(begin));
    if (base == MAP_FAILED) {
        throw Error(ErrorKind::refused, index_.shards()[shard].path + " cannot be mapped for writing (" +
                                            std::strerror(errno) + "): use the arena store");
    }
    regions_[shard].base = static_cast<char*>(base) - begin;
    watch(shard);
}

void* CopyingStore::region(uint32_t shard) {
    auto& region = regions_[shard];
    if (region.base == nullptr) {
        map(shard, nullptr, 0, region.bytes);
        register_region(region.base, region.bytes);
    }
    return region.base;
}

void CopyingStore::adopt(uint32_t shard, const Mapping& mapping) {
    use(shard, mapping);
    map(shard, mapping.base + mapping.begin, mapping.begin, mapping.end);
}

void CopyingStore::load_dense() {
    if (options_.dense == "mlock") lock_exactly();
}

void CopyingStore::set_capacities(std::span<const uint32_t> capacities) {
    const auto& parts = geometry_.parts();
    if (capacities.size() != parts.size()) throw Error(ErrorKind::usage, "one capacity a part is needed");
    cache_ = make_expert_cache(capacities);
    uint32_t widest = 0;
    for (const auto& bank : index_.banks()) widest = std::max(widest, bank.count);
    loads_.reserve(widest);
    routed_.reserve(widest);
}

// False when what this route would write for the first time goes beyond the limit.
bool CopyingStore::may_grow(uint32_t bank, std::span<const RoutedExpert> experts) {
    if (growth_limit_ == 0) return true;
    const auto& tensors = index_.banks()[bank].tensors;
    uint64_t more = 0;
    for (const auto& routed : experts) {
        for (uint32_t slot = 0; slot < tensors.size(); ++slot) {
            if (!written_[tag(routed.expert, slot)]) more += geometry_.movable_bytes(tensors[slot]);
        }
    }
    if (grown_ + more <= growth_limit_) return true;
    fail(0, "cow has copied " + megabytes(grown_) + " of experts and keeps every page it has written: the next layer "
            "would go beyond the " + megabytes(growth_limit_) + " that are left of the cap; stopped before the "
            "machine suffers (an arena stays within its budget)");
    return false;
}

bool CopyingStore::route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) {
    const uint64_t start = now_ns(), asleep = counters_.stall_ns;
    while (in_flight_ > 0) reap();  // of a step that was cancelled
    loads_.clear();
    routed_.clear();
    routed_bank_ = bank;
    if (geometry_.part_of_bank(bank) == kNone) return true;
    if (!may_grow(bank, experts)) return false;
    routed_.assign(experts.begin(), experts.end());
    if (!cache_->route(experts, token, tokens, loads_)) {
        refuse_width(*cache_, bank, experts.size());
        return false;
    }
    // Forgotten, no more: the pages stay what they are.
    for (const Load& load : loads_) {
        for (uint32_t slot = 0; load.victim != kNone && slot < kSlots; ++slot) there_[tag(load.victim, slot)] = false;
    }
    const bool good = load(bank);
    counters_.memory_ns += now_ns() - start - (counters_.stall_ns - asleep);
    return good;
}

// Reads what the route needs and the cache lacks, or holds only in name because an earlier read failed.
bool CopyingStore::load(uint32_t bank) {
    for (uint32_t slot = 0; slot < index_.banks()[bank].tensors.size(); ++slot) {
        for (const auto& routed : routed_) {
            if (there_[tag(routed.expert, slot)]) continue;
            while (free_.empty() && !failure_) sleep();
            if (failure_) return false;
            submit(routed.expert, slot);
        }
    }
    return !failure_;
}

void CopyingStore::submit(uint32_t expert, uint32_t slot) {
    const uint32_t tensor = index_.banks()[index_.bank_of(expert)].tensors[slot];
    const auto bytes = static_cast<uint32_t>(geometry_.movable_bytes(tensor));
    if (bytes == 0) return;
    const uint32_t place = free_.back();
    free_.pop_back();
    tag_at_[place] = tag(expert, slot);
    reading_[tag(expert, slot)] = true;
    ++in_flight_;
    counters_.bytes += bytes;
    if (recorder_ != nullptr) recorder_->issued(expert, slot, SlabKind::demand, bytes, now_ns());
    const uint64_t offset = geometry_.movable_offset(tensor, index_.id_of(expert));
    reader_->submit(Read{regions_[index_.tensors()[tensor].shard].fd, place, offset, staging_->at(place), bytes},
                    Urgency::demand);
}

// Until a slab is there; what is not copying is sleep.
void CopyingStore::sleep() {
    const uint64_t start = now_ns(), copying = copy_ns_;
    reap();
    counters_.stall_ns += now_ns() - start - (copy_ns_ - copying);
}

void CopyingStore::reap() {
    std::array<Completion, kMostStaged> done;
    const size_t count = reader_->reap(done, true);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t place = done[i].tag, tag = tag_at_[place];
        const uint32_t expert = tag / kSlots, slot = tag % kSlots;
        --in_flight_;
        reading_[tag] = false;
        if (done[i].error == 0) {
            if (recorder_ != nullptr) recorder_->ready(expert, slot, done[i].ready_ns);
            copy(place);
        } else {
            fail_read(expert, slot, done[i]);
        }
        free_.push_back(place);
    }
}

void CopyingStore::copy(uint32_t place) {
    const uint64_t start = now_ns();
    const uint32_t tag = tag_at_[place], expert = tag / kSlots;
    const uint32_t tensor = index_.banks()[index_.bank_of(expert)].tensors[tag % kSlots];
    const auto bytes = static_cast<size_t>(geometry_.movable_bytes(tensor));
    std::memcpy(slab_page(tensor, index_.id_of(expert)), staging_->at(place), bytes);
    forget_cached(tensor, index_.id_of(expert));
    copied_ += bytes;
    if (!written_[tag]) grown_ += bytes;
    written_[tag] = there_[tag] = true;
    copy_ns_ += now_ns() - start;
}

uint32_t CopyingStore::slot_of(uint32_t tensor) const {
    const auto& tensors = index_.banks()[index_.tensors()[tensor].bank].tensors;
    return static_cast<uint32_t>(std::find(tensors.begin(), tensors.end(), tensor) - tensors.begin());
}

bool CopyingStore::pending(uint32_t tensor) const {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    const uint32_t slot = slot_of(tensor);
    return std::any_of(routed_.begin(), routed_.end(),
                       [&](const RoutedExpert& routed) { return reading_[tag(routed.expert, slot)]; });
}

bool CopyingStore::wait(uint32_t tensor) {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    const uint32_t slot = slot_of(tensor);
    const uint64_t copying = copy_ns_;
    for (const auto& routed : routed_) {
        const uint64_t start = now_ns(), stall = counters_.stall_ns;
        while (reading_[tag(routed.expert, slot)]) sleep();
        if (recorder_ != nullptr) recorder_->needed(routed.expert, slot, start, counters_.stall_ns - stall);
    }
    counters_.memory_ns += copy_ns_ - copying;
    return !failure_;
}

StoreCounters CopyingStore::counters() const {
    StoreCounters result = counters_;
    if (cache_ == nullptr) return result;
    result.hits = cache_->counters().hits;
    result.misses = cache_->counters().misses;
    return result;
}

std::map<std::string, uint64_t> CopyingStore::engagement() const {
    return {{"bytes copied", copied_},
            {"bytes written at least once", grown_},
            {"pieces read", reader_->counters().pieces},
            {"huge staging bytes", staging_->huge_bytes()}};
}

void CopyingStore::clear_failure() {
    while (in_flight_ > 0) reap();
    failure_.reset();
}

}  // namespace moestream
