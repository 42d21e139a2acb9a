// arena: a fixed set of physical pages, moved to wherever the next expert must appear.
//
// Every slab keeps one permanent address, congruent to its file offset modulo the page, so O_DIRECT lands in place
// and llama.cpp's graph needs no change. The pages of an evicted expert are moved to the loaded one with mremap: no
// copy, no zeroing, no fault. Pages of experts that were never loaded lie in the pool, which is also where a frame
// without an expert is parked. Other sources of pages (page_source.h) are there to be measured against this one. Which
// pages an expert has is frames.h; here is what is read into them, and when.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "frames.h"
#include "moestream/interpose.h"
#include "pages.h"
#include "shards.h"

namespace moestream {
namespace {

constexpr uint32_t kReaderQueue = 4096;

enum class SlabState : uint8_t { absent, reading, present };

class ArenaStore : public ShardedStore {
  public:
    ArenaStore(const SlabIndex& index, const StoreOptions& options);

    void* region(uint32_t shard) override;
    void adopt(uint32_t shard, const Mapping& mapping) override;
    void load_dense() override;
    void set_capacities(std::span<const uint32_t> capacities) override;
    std::vector<uint32_t> resize(std::span<const uint32_t> capacities) override;
    bool streams() const override { return !geometry_.parts().empty(); }
    bool route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) override;
    bool pending(uint32_t tensor) const override;
    bool wait(uint32_t tensor) override;
    void speculate(std::span<const uint32_t> experts) override;
    bool demand_idle() const override { return demand_in_flight_ == 0; }
    void end_step() override { drop_unkept(); }
    StoreCounters counters() const override;
    std::map<std::string, uint64_t> engagement() const override;
    void clear_failure() override;

  private:
    uint32_t slot_of(uint32_t tensor) const { return slot_[tensor]; }
    uint32_t tag(uint32_t expert, uint32_t slot) const { return expert * kSlots + slot; }
    const Bank& bank_of(uint32_t expert) const { return index_.banks()[index_.bank_of(expert)]; }
    char* page_of(uint32_t expert, uint32_t slot) const {
        return slab_page(bank_of(expert).tensors[slot], index_.id_of(expert));
    }
    bool settle(uint32_t expert);
    void take(const Completion& completion);
    void reap(bool sleep);
    bool take_frame(const Load& load);
    bool move_slab(const Load& load, uint32_t slot);
    bool moved(int error);
    void submit(uint32_t expert, uint32_t slot, Urgency urgency);
    void promote(uint32_t expert);
    void drop_speculation();
    void drop_unkept();
    bool drop_pages(uint32_t expert);
    bool dropped(int error);

    Frames frames_;
    std::unique_ptr<Reader> reader_;
    std::unique_ptr<ExpertCache> cache_;
    std::vector<SlabState> state_;                   // a tag
    std::vector<bool> demanded_;                     // a tag: the current route waits for it
    std::vector<uint32_t> slot_;                     // a tensor: its place in its bank
    std::vector<Load> loads_;
    std::vector<RoutedExpert> routed_;               // the current route's experts
    uint32_t routed_bank_ = kNone;
    size_t demand_in_flight_ = 0;
    uint64_t slabs_read_ = 0;
    bool drops_ = false;  // the policy lets experts go after their use
};

ArenaStore::ArenaStore(const SlabIndex& index, const StoreOptions& options)
    : ShardedStore(index, options),
      frames_(index_, geometry_, options_),
      reader_(make_reader(options.reader, ReaderOptions{kReaderQueue})),
      state_(size_t{index.experts()} * kSlots, SlabState::absent),
      demanded_(size_t{index.experts()} * kSlots), slot_(index.tensors().size()) {
    if (options_.dense == "mapped") {
        throw Error(ErrorKind::usage, "the arena keeps dense bytes in memory of its own: use dense anon or mlock");
    }
    for (const auto& bank : index.banks()) {
        for (uint32_t slot = 0; slot < bank.tensors.size(); ++slot) slot_[bank.tensors[slot]] = slot;
    }
    open_shards(options_.direct);
}

void* ArenaStore::region(uint32_t shard) {
    auto& region = regions_[shard];
    if (region.base == nullptr) {
        region.base = reserve(region.bytes, options_.alignment, nullptr, options_.closed);
        frames_.region(region.base, shard);
        register_region(region.base, region.bytes);
    }
    return region.base;
}

void ArenaStore::adopt(uint32_t shard, const Mapping& mapping) {
    overlay(shard, mapping);
    if (reinterpret_cast<uintptr_t>(mapping.base) % options_.alignment != 0) {
        options_.fallback("llama.cpp's own mapping decides where a slab lies: alignment is not as asked");
    }
    frames_.region(mapping.base, shard);
}

void ArenaStore::load_dense() {
    read_resident(*reader_);
    if (options_.dense == "mlock") lock_resident();
}

void ArenaStore::set_capacities(std::span<const uint32_t> capacities) {
    const auto& parts = geometry_.parts();
    if (capacities.size() != parts.size()) throw Error(ErrorKind::usage, "one capacity a part is needed");
    frames_.set_capacities(capacities);
    cache_ = make_expert_cache(capacities);
    uint32_t widest = 0;
    drops_ = options_.policy.rfind("dontneed", 0) == 0;
    for (const auto& bank : index_.banks()) widest = std::max(widest, bank.count);
    loads_.reserve(widest);
    routed_.reserve(widest);
}

void ArenaStore::take(const Completion& completion) {
    const uint32_t expert = completion.tag / kSlots;
    const uint32_t slot = completion.tag % kSlots;
    if (demanded_[completion.tag]) {
        demanded_[completion.tag] = false;
        --demand_in_flight_;
    }
    if (completion.error == 0) {
        if (recorder_ != nullptr) recorder_->ready(expert, slot, completion.ready_ns);
        state_[completion.tag] = SlabState::present;
        forget_cached(bank_of(expert).tensors[slot], index_.id_of(expert));
        ++slabs_read_;
        return;
    }
    state_[completion.tag] = SlabState::absent;
    fail_read(expert, slot, completion);
}

void ArenaStore::reap(bool sleep) {
    std::array<Completion, 64> done;
    const size_t count = reader_->reap(done, sleep);
    for (size_t i = 0; i < count; ++i) take(done[i]);
}

// No page moves while a read into it is in flight.
bool ArenaStore::settle(uint32_t expert) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
        while (state_[tag(expert, slot)] == SlabState::reading) reap(true);
        state_[tag(expert, slot)] = SlabState::absent;
    }
    return !failure_;
}

// Decides where the pages of load.expert come from; the pages follow slab by slab in move_slab.
bool ArenaStore::take_frame(const Load& load) {
    if (load.victim == kNone) {
        frames_.take(load.expert);
        return true;
    }
    frames_.take_from(load.victim, load.expert);
    return settle(load.victim);
}

bool ArenaStore::move_slab(const Load& load, uint32_t slot) {
    char* const left = load.victim == kNone ? nullptr : page_of(load.victim, slot);
    return moved(frames_.supply(load.expert, slot, left, page_of(load.expert, slot)));
}

bool ArenaStore::moved(int error) {
    if (error == 0) return true;
    if (error == EEXIST) {
        fail(0, "other code of this process has mapped memory where experts belong, after a move of pages that failed: "
                "load the model again");
        return false;
    }
    fail(error, std::string("moving an expert's pages: ") + std::strerror(error) +
                    (error == ENOMEM ? " (" + mappings_remedy() + ")" : ""));
    return false;
}

void ArenaStore::submit(uint32_t expert, uint32_t slot, Urgency urgency) {
    const uint32_t tensor = bank_of(expert).tensors[slot];
    const uint32_t t = tag(expert, slot);
    const auto bytes = static_cast<uint32_t>(geometry_.movable_bytes(tensor));
    if (bytes == 0) {
        state_[t] = SlabState::present;
        return;
    }
    const auto& shard = regions_[index_.tensors()[tensor].shard];
    const uint64_t offset = geometry_.movable_offset(tensor, index_.id_of(expert));
    state_[t] = SlabState::reading;
    if (urgency == Urgency::demand) {
        demanded_[t] = true;
        ++demand_in_flight_;
    }
    counters_.bytes += bytes;
    if (recorder_ != nullptr) {
        const auto kind = urgency == Urgency::demand ? SlabKind::demand : SlabKind::speculative;
        recorder_->issued(expert, slot, kind, bytes, now_ns());
    }
    reader_->submit(Read{shard.fd, t, offset, shard.base + offset, bytes}, urgency);
}

// A routed expert that is resident may still be on its way (read early) or have a slab that was never started,
// nor opened where a move failed.
void ArenaStore::promote(uint32_t expert) {
    for (uint32_t slot = 0; slot < bank_of(expert).tensors.size(); ++slot) {
        const uint32_t t = tag(expert, slot);
        if (state_[t] == SlabState::absent) {
            if (!moved(frames_.open(expert, slot, page_of(expert, slot)))) return;
            submit(expert, slot, Urgency::demand);
        } else if (state_[t] == SlabState::reading && !demanded_[t]) {
            demanded_[t] = true;
            ++demand_in_flight_;
            reader_->promote(t);
        }
    }
}

bool ArenaStore::route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) {
    const uint64_t start = now_ns();
    reap(false);
    drop_unkept();
    loads_.clear();
    routed_.clear();
    routed_bank_ = bank;
    if (geometry_.part_of_bank(bank) == kNone) return true;
    if (!moved(frames_.mend())) return false;
    routed_.assign(experts.begin(), experts.end());
    if (!cache_->route(experts, token, tokens, loads_)) {
        refuse_width(*cache_, bank, experts.size());
        return false;
    }
    for (const Load& load : loads_) {
        if (!take_frame(load)) return false;
    }
    const uint32_t slots = static_cast<uint32_t>(index_.banks()[bank].tensors.size());
    for (uint32_t slot = 0; slot < slots; ++slot) {
        for (const Load& load : loads_) {
            if (!move_slab(load, slot)) return false;
            submit(load.expert, slot, Urgency::demand);
        }
    }
    for (const auto& routed : routed_) promote(routed.expert);
    cache_->release_speculative(bank);
    drop_speculation();
    counters_.memory_ns += now_ns() - start;
    return !failure_;
}

bool ArenaStore::pending(uint32_t tensor) const {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    for (const auto& routed : routed_) {
        if (state_[tag(routed.expert, slot_of(tensor))] == SlabState::reading) return true;
    }
    return false;
}

bool ArenaStore::wait(uint32_t tensor) {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    reap(false);
    const uint32_t slot = slot_of(tensor);
    for (const auto& routed : routed_) {
        const uint32_t t = tag(routed.expert, slot);
        uint64_t start = 0, waited = 0;
        if (state_[t] == SlabState::reading) {
            start = now_ns();
            while (state_[t] == SlabState::reading) reap(true);
            waited = now_ns() - start;
            counters_.stall_ns += waited;
        }
        if (recorder_ != nullptr) recorder_->needed(routed.expert, slot, start != 0 ? start : now_ns(), waited);
    }
    return !failure_;
}

// The last route's matmuls are over: what the policy does not keep gives its pages back to the system.
void ArenaStore::drop_unkept() {
    if (!drops_ || cache_ == nullptr) return;
    cache_->unpin_route();
    for (const auto& routed : routed_) {
        const uint32_t expert = routed.expert;
        const bool there = cache_->cached(expert) && cache_->residency(expert) == Residency::resident;
        if (!there || cache_->keep(expert)) continue;
        if (!drop_pages(expert)) return;
        cache_->drop(expert);
        frames_.put_back(cache_->part_of(expert));
    }
    routed_.clear();
}

bool ArenaStore::drop_pages(uint32_t expert) {
    if (!settle(expert)) return false;
    for (const uint32_t tensor : bank_of(expert).tensors) {
        const auto bytes = static_cast<size_t>(geometry_.movable_bytes(tensor));
        if (bytes > 0 && !dropped(frames_.drop(slab_page(tensor, index_.id_of(expert)), bytes))) return false;
    }
    frames_.vacate(expert);
    return true;
}

bool ArenaStore::dropped(int error) {
    if (error != 0) fail(error, std::string("dropping an expert's pages: ") + std::strerror(error));
    return error == 0;
}

// Who must leave takes its frame along; what is still too much of frames goes from those that are free.
std::vector<uint32_t> ArenaStore::resize(std::span<const uint32_t> capacities) {
    const auto& parts = geometry_.parts();
    if (cache_ == nullptr || capacities.size() != parts.size()) {
        throw Error(ErrorKind::usage, "one capacity a part is needed, and a budget before");
    }
    drop_speculation();
    routed_.clear();
    routed_bank_ = kNone;
    std::vector<uint32_t> reached;
    for (uint32_t p = 0; p < parts.size(); ++p) {
        std::vector<uint32_t> left;
        const uint32_t before = cache_->parts()[p].capacity;
        reached.push_back(cache_->set_capacity(p, capacities[p], left));
        for (const uint32_t expert : left) {
            if (!drop_pages(expert)) throw Error(ErrorKind::io, failure_->what);
        }
        if (reached[p] > before) frames_.add(p, reached[p] - before);
        const size_t stayed = before - left.size();
        const bool fewer = stayed <= reached[p] || dropped(frames_.remove(p, stayed - reached[p]));
        if (!fewer) throw Error(ErrorKind::io, failure_->what);
    }
    return reached;
}

void ArenaStore::drop_speculation() {
    reader_->drop_speculative([this](const Read& read) {
        state_[read.tag] = SlabState::absent;
        if (recorder_ != nullptr) recorder_->dropped(read.tag / kSlots, read.tag % kSlots);
        counters_.bytes -= read.bytes;
    });
}

void ArenaStore::speculate(std::span<const uint32_t> experts) {
    if (experts.empty() || failure_) return;
    const uint64_t start = now_ns();
    for (const uint32_t expert : experts) {
        Load load;
        if (!cache_->cached(expert) || !cache_->speculate(expert, load)) continue;
        if (!take_frame(load)) break;
        for (uint32_t slot = 0; slot < bank_of(expert).tensors.size(); ++slot) {
            if (!move_slab(load, slot)) return;
            submit(expert, slot, Urgency::speculative);
        }
    }
    counters_.memory_ns += now_ns() - start;
}

// What was in flight beside the read that failed belongs to the same failure, not to the next step.
void ArenaStore::clear_failure() {
    drop_speculation();
    while (reader_->in_flight() > 0) reap(true);
    failure_.reset();
}

std::map<std::string, uint64_t> ArenaStore::engagement() const {
    auto counts = frames_.counts();
    counts["pieces read"] = reader_->counters().pieces;
    if (options_.keep_cached) counts["slabs left in the page cache"] = slabs_read_;
    return counts;
}

StoreCounters ArenaStore::counters() const {
    StoreCounters result = counters_;
    if (cache_ == nullptr) return result;
    const auto& cache = cache_->counters();
    result.hits = cache.hits;
    result.misses = cache.misses;
    result.speculative_issued = cache.speculative_issued;
    result.speculative_used = cache.speculative_used;
    uint64_t frame = 0;
    for (const auto& part : geometry_.parts()) frame = std::max<uint64_t>(frame, part.frame_pages * kPage);
    result.speculative_wasted_bytes = cache.speculative_wasted * frame;
    return result;
}

const StoreRegistration registration(
    "arena", "a fixed set of pages, moved by mremap to wherever the next expert must appear",
    [](const SlabIndex& index, const StoreOptions& options) -> std::unique_ptr<Store> {
        return std::make_unique<ArenaStore>(index, options);
    });

}  // namespace
}  // namespace moestream
