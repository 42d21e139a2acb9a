// A route's slabs cut into pieces for a crew, each thread with a scratch of its own.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "crew.h"
#include "scratch.h"

namespace moestream {

class PieceWarmer : public Warmer {
  public:
    PieceWarmer(const WarmerOptions& options, CrewShape shape)
        : pieces_(shape.pieces), crew_(shape.threads, [this](size_t piece, uint32_t thread) { take(piece, thread); }) {
        for (uint32_t t = 0; t < shape.threads; ++t) scratch_.push_back(std::make_unique<Scratch>(options));
    }

    Trouble warm(std::span<MappedSlab> slabs) override {
        slabs_ = slabs;
        error_ = 0;
        crew_.run(slabs.size() * pieces_);
        if (error_ != 0) return {error_, slabs[failed_]};
        for (auto& slab : slabs) slab.asked = slab.bytes;
        return {};
    }

  protected:
    // Bytes [begin, begin + bytes) of the slab. 0 or errno; called by several threads at once.
    virtual int piece(const MappedSlab& slab, uint64_t begin, uint64_t bytes, const Scratch& scratch) = 0;
    uint64_t done_pieces() const { return done_; }
    uint64_t huge_bytes() const {
        uint64_t bytes = 0;
        for (const auto& scratch : scratch_) bytes += scratch->huge_bytes();
        return bytes;
    }

  private:
    void take(size_t number, uint32_t thread) {
        const auto& slab = slabs_[number / pieces_];
        const uint64_t size = ((slab.bytes + pieces_ - 1) / pieces_ + kPage - 1) / kPage * kPage;
        const uint64_t begin = std::min(slab.bytes, number % pieces_ * size);
        const uint64_t bytes = std::min(slab.bytes - begin, size);
        if (bytes == 0 || error_ != 0) return;
        const int error = piece(slab, begin, bytes, *scratch_[thread]);
        done_ += error == 0;
        int none = 0;
        if (error != 0 && error_.compare_exchange_strong(none, error)) failed_ = number / pieces_;
    }

    size_t pieces_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
    std::span<const MappedSlab> slabs_;
    std::atomic<int> error_{0};
    std::atomic<size_t> failed_{0};
    std::atomic<uint64_t> done_{0};
    Crew crew_;  // last: its threads end before what they use
};

}  // namespace moestream
