#include "copying.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "pages.h"

namespace moestream {
namespace {

constexpr uint64_t kHuge = uint64_t{2} << 20;

std::string megabytes(uint64_t bytes) { return std::to_string(bytes / 1000000) + " MB"; }

}  // namespace

CopyingStore::CopyingStore(const SlabIndex& index, const StoreOptions& options)
    : ShardedStore(index, options), reader_(make_reader(options.reader, ReaderOptions{kStaged})),
      reading_(size_t{index.experts()} * kSlots), written_(size_t{index.experts()} * kSlots) {
    if (options.dense == "anon") {
        throw Error(ErrorKind::usage, "its dense bytes stay in the file mapping: use dense mapped or mlock");
    }
    open_shards(options_.direct);
    make_staging();
}

CopyingStore::~CopyingStore() {
    reader_.reset();  // nothing is read into staging any more
    release(staging_base_, staging_bytes_);
}

void CopyingStore::adopt(uint32_t, const Mapping&) {
    throw Error(ErrorKind::refused, "store " + std::string(options_.copy_dir.empty() ? "cow" : "cow or shared") +
                                        " needs a mapping of its own, and no import slot of mmap was found: use mapped "
                                        "or arena");
}

void CopyingStore::load_dense() {
    if (options_.dense == "mlock") lock_exactly();
}

// Each place begins at a multiple of the alignment asked for and of no larger power of two.
void CopyingStore::make_staging() {
    uint64_t largest = kPage;
    for (uint32_t t = 0; t < index_.tensors().size(); ++t) largest = std::max(largest, geometry_.movable_bytes(t));
    const bool whole = options_.huge || options_.alignment >= kHuge;
    const uint64_t unit = whole ? kHuge : std::max<uint64_t>(options_.alignment * 2, kPage);
    const uint64_t shift = whole ? 0 : options_.alignment;
    const uint64_t stride = (largest + unit - 1) / unit * unit + (whole ? 0 : unit);
    staging_bytes_ = stride * kStaged + shift;
    staging_base_ = reserve(staging_bytes_, std::max(unit, kHuge));
    if (options_.huge && madvise(staging_base_, staging_bytes_, MADV_HUGEPAGE) != 0) {
        options_.fallback("staging is not in huge pages: see /sys/kernel/mm/transparent_hugepage");
    }
    for (uint32_t i = 0; i < kStaged; ++i) {
        staging_.push_back({staging_base_ + shift + i * stride, kNone});
        free_.push_back(i);
    }
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

// False when what these loads would write for the first time goes beyond the limit.
bool CopyingStore::grow(std::span<const Load> loads, uint32_t bank) {
    const auto& tensors = index_.banks()[bank].tensors;
    uint64_t more = 0;
    for (const auto& load : loads) {
        for (uint32_t slot = 0; slot < tensors.size(); ++slot) {
            if (!written_[tag(load.expert, slot)]) more += geometry_.movable_bytes(tensors[slot]);
        }
    }
    if (options_.growth_limit == 0 || grown_ + more <= options_.growth_limit) return true;
    fail(0, "cow has copied " + megabytes(grown_) + " of experts and keeps every page it has written: the next layer "
            "would go beyond the " + megabytes(options_.growth_limit) + " that are left of the cap; stopped before the "
            "machine suffers (an arena stays within its budget)");
    return false;
}

bool CopyingStore::route(uint32_t bank, std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens) {
    const uint64_t start = now_ns();
    loads_.clear();
    routed_.clear();
    routed_bank_ = bank;
    if (geometry_.part_of_bank(bank) == kNone) return true;
    routed_.assign(experts.begin(), experts.end());
    if (!cache_->route(experts, token, tokens, loads_)) {
        fail(0, "layer " + std::to_string(index_.banks()[bank].layer) + " needs " + std::to_string(experts.size()) +
                    " experts at once and the budget holds " +
                    std::to_string(cache_->parts()[geometry_.part_of_bank(bank)].capacity) +
                    ": use a smaller n_batch or name more memory");
        return false;
    }
    if (!grow(loads_, bank)) return false;
    const auto slots = static_cast<uint32_t>(index_.banks()[bank].tensors.size());
    for (uint32_t slot = 0; slot < slots; ++slot) {
        for (const Load& load : loads_) {
            while (free_.empty() && !failure_) reap();
            if (failure_) return false;
            submit(load.expert, slot);
        }
    }
    counters_.memory_ns += now_ns() - start;
    return !failure_;
}

void CopyingStore::submit(uint32_t expert, uint32_t slot) {
    const uint32_t tensor = index_.banks()[index_.bank_of(expert)].tensors[slot];
    const auto bytes = static_cast<uint32_t>(geometry_.movable_bytes(tensor));
    if (bytes == 0) return;
    const uint32_t place = free_.back();
    free_.pop_back();
    staging_[place].tag = tag(expert, slot);
    reading_[tag(expert, slot)] = true;
    ++in_flight_;
    counters_.bytes += bytes;
    if (recorder_ != nullptr) recorder_->issued(expert, slot, SlabKind::demand, bytes, now_ns());
    const uint64_t offset = geometry_.movable_offset(tensor, index_.id_of(expert));
    reader_->submit(Read{regions_[index_.tensors()[tensor].shard].fd, place, offset, staging_[place].data, bytes},
                    Urgency::demand);
}

void CopyingStore::reap() {
    std::array<Completion, kStaged> done;
    const size_t count = reader_->reap(done, true);
    for (size_t i = 0; i < count; ++i) {
        Staging& staging = staging_[done[i].tag];
        const uint32_t expert = staging.tag / kSlots, slot = staging.tag % kSlots;
        --in_flight_;
        reading_[staging.tag] = false;
        free_.push_back(done[i].tag);
        if (done[i].error == 0) {
            if (recorder_ != nullptr) recorder_->ready(expert, slot, done[i].ready_ns);
            copy(staging);
            continue;
        }
        const auto& tensor = index_.tensors()[index_.banks()[index_.bank_of(expert)].tensors[slot]];
        fail(done[i].error, index_.shards()[tensor.shard].path + " at byte " + std::to_string(done[i].fail_offset) +
                                " (" + tensor.name + ", expert " + std::to_string(index_.id_of(expert)) + "): " +
                                (done[i].error == ENODATA ? "the file ends early" : std::strerror(done[i].error)));
    }
}

void CopyingStore::copy(Staging& staging) {
    const uint64_t start = now_ns();
    const uint32_t expert = staging.tag / kSlots, slot = staging.tag % kSlots;
    const uint32_t tensor = index_.banks()[index_.bank_of(expert)].tensors[slot];
    const auto bytes = static_cast<size_t>(geometry_.movable_bytes(tensor));
    std::memcpy(slab_page(tensor, index_.id_of(expert)), staging.data, bytes);
    copied_ += bytes;
    if (!written_[staging.tag]) grown_ += bytes;
    written_[staging.tag] = true;
    counters_.memory_ns += now_ns() - start;
}

bool CopyingStore::pending(uint32_t tensor) const {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    const auto& tensors = index_.banks()[routed_bank_].tensors;
    const auto slot = static_cast<uint32_t>(std::find(tensors.begin(), tensors.end(), tensor) - tensors.begin());
    return std::any_of(routed_.begin(), routed_.end(),
                       [&](const RoutedExpert& routed) { return reading_[tag(routed.expert, slot)]; });
}

bool CopyingStore::wait(uint32_t tensor) {
    if (index_.tensors()[tensor].bank != routed_bank_) return false;
    const auto& tensors = index_.banks()[routed_bank_].tensors;
    const auto slot = static_cast<uint32_t>(std::find(tensors.begin(), tensors.end(), tensor) - tensors.begin());
    for (const auto& routed : routed_) {
        const uint64_t start = now_ns(), work = counters_.memory_ns;
        uint64_t waited = 0;
        if (reading_[tag(routed.expert, slot)]) {
            while (reading_[tag(routed.expert, slot)]) reap();
            // Copying is work, not waiting, though it happens here.
            waited = now_ns() - start - (counters_.memory_ns - work);
            counters_.stall_ns += waited;
        }
        if (recorder_ != nullptr) recorder_->needed(routed.expert, slot, start, waited);
    }
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
    return {{"bytes copied", copied_}, {"bytes written at least once", grown_}};
}

void CopyingStore::clear_failure() {
    while (reader_->in_flight() > 0) reap();
    failure_.reset();
}

}  // namespace moestream
