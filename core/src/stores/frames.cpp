#include "frames.h"

#include <algorithm>
#include <cerrno>
#include <string>

#include "pages.h"

namespace moestream {

Frames::Frames(const SlabIndex& index, const Geometry& geometry, const StoreOptions& options)
    : index_(index), geometry_(geometry), options_(options),
      source_(make_page_source(options.pages, {&index, &geometry, options.fallback})), place_(index.experts()) {}

void Frames::set_capacities(std::span<const uint32_t> capacities) {
    count_mappings(capacities);
    const auto& parts = geometry_.parts();
    free_.resize(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) {
        free_[p] = source_->frames(capacities[p], size_t{parts[p].frame_pages} * kPage);
        std::reverse(free_[p].begin(), free_[p].end());  // the first is handed out first
    }
}

// A slab with pages is a mapping of its own and so is the gap behind it; vacated ones keep theirs unless restored.
void Frames::count_mappings(std::span<const uint32_t> capacities) {
    const auto& parts = geometry_.parts();
    uint64_t slabs = 0;
    uint64_t resident_slabs = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
        for (const uint32_t bank : parts[p].banks) {
            slabs += uint64_t{index_.banks()[bank].count} * index_.banks()[bank].tensors.size();
        }
        resident_slabs += uint64_t{capacities[p]} * parts[p].pages.size();
    }
    const uint64_t room = options_.max_mappings / 10 * 9;
    restore_ = 2 * slabs > room;
    if (restore_ && 2 * resident_slabs > room) {
        throw Error(ErrorKind::refused, "this budget needs " + std::to_string(2 * resident_slabs) +
                                            " memory mappings and vm.max_map_count allows " +
                                            std::to_string(options_.max_mappings) + ": `sysctl vm.max_map_count=" +
                                            std::to_string(2 * resident_slabs / 9 * 10 + 10) +
                                            "`, or name a smaller budget");
    }
}

void Frames::take(uint32_t expert) {
    auto& free = free_[geometry_.part_of_bank(index_.bank_of(expert))];
    place_[expert] = free.back();
    free.pop_back();
}

void Frames::take_from(uint32_t victim, uint32_t expert) {
    place_[expert] = place_[victim];
    place_[victim] = nullptr;
}

int Frames::supply(uint32_t expert, uint32_t slot, char* left, char* to) {
    const auto& part = part_of(expert);
    const size_t bytes = part.pages[slot] * kPage;
    if (bytes == 0) return 0;
    char* from = left;
    if (from == nullptr && place_[expert] != nullptr) {
        from = place_[expert];
        for (uint32_t s = 0; s < slot; ++s) from += part.pages[s] * kPage;
    }
    int error = open(expert, slot, to);
    if (error == 0) error = source_->supply(from, to, bytes, restore_ && !options_.closed);
    // What comes from a slab that a failure kept from being opened has come closed.
    if (error == 0 && from != nullptr) error = open(expert, slot, to);
    if (error == 0 && options_.closed && from != nullptr) error = close_pages(from, bytes);
    if (error != 0) map_at_once(to, bytes);
    return error;
}

// mremap unmaps where pages are to go before it looks whether they may: whoever maps next would be given that address.
void Frames::map_at_once(char* at, size_t bytes) {
    const int error = map_again(at, bytes, options_.closed);
    if (error != 0 && error != EEXIST) holes_.emplace_back(at, bytes);  // EEXIST: mremap had not come so far
}

int Frames::mend() {
    while (!holes_.empty() && !taken_) {
        const int error = map_again(holes_.back().first, holes_.back().second, options_.closed);
        taken_ = error == EEXIST;
        if (error != 0) return error;
        holes_.pop_back();
    }
    return taken_ ? EEXIST : 0;
}

bool Frames::is_hole(const char* at) const {
    return std::any_of(holes_.begin(), holes_.end(), [at](const auto& hole) { return hole.first == at; });
}

int Frames::open(uint32_t expert, uint32_t slot, char* at) {
    const size_t bytes = part_of(expert).pages[slot] * kPage;
    return options_.closed && bytes > 0 ? open_pages(at, bytes) : 0;
}

int Frames::drop(char* at, size_t bytes) {
    if (is_hole(at)) return 0;
    int error = source_->drop(at, bytes);
    if (error == 0 && options_.closed) error = close_pages(at, bytes);
    return error;
}

int Frames::remove(uint32_t part, size_t count) {
    auto& free = free_[part];
    for (; count > 0; --count) {
        const int error =
            free.back() == nullptr ? 0 : drop(free.back(), size_t{geometry_.parts()[part].frame_pages} * kPage);
        if (error != 0) return error;
        free.pop_back();
    }
    return 0;
}

}  // namespace moestream
