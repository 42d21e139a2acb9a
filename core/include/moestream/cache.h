// The cache's decisions: what a route finds, what it must load and whose place that takes. No bytes move here; a
// store carries the decisions out in the engine, nothing does in replay. One implementation for both.
//
// The budget is cut into *parts*: experts whose slabs have the same sizes, so that any expert of a part fits into
// the frame of any other and a frame is never cut. Each part has a capacity in experts and its own policy object.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moestream/policy.h"
#include "moestream/slab_index.h"

namespace moestream {

struct RoutedExpert {
    uint32_t expert = 0;  // global number
    uint32_t count = 1;   // tokens of the step that chose it
};

struct Load {
    uint32_t expert = 0;
    uint32_t victim = kNone;  // whose frame it takes; kNone: a frame that was free
};

enum class Residency : uint8_t { absent, resident, speculative };  // speculative: loaded early, not yet routed

struct CacheCounters {
    uint64_t hits = 0;         // routed experts that were resident (or speculatively loaded)
    uint64_t misses = 0;       // routed experts that had to be loaded
    uint64_t evictions = 0;
    uint64_t speculative_issued = 0;  // taken-back ones (cancel) do not count
    uint64_t speculative_used = 0;    // routed before they left
    uint64_t speculative_wasted = 0;  // left without being routed
};

class ExpertCache {
  public:
    struct Part {
        std::vector<uint32_t> experts;  // global numbers, ascending
        uint32_t capacity = 0;          // experts; at least 1, at most experts.size()
    };
    // `bank_of[e]` is the bank of global expert e. Every expert belongs to exactly one part or to none (experts
    // that are always resident); the experts of one bank that are in a part are all in the same one. `priority` is a
    // seed for policies that take one, by global expert, or empty. Throws Error(usage) on parts that are not so,
    // on a seed of another length and on an unknown policy.
    ExpertCache(std::vector<Part> parts, std::vector<uint32_t> bank_of, std::string_view policy,
                std::span<const double> priority = {});
    ExpertCache(ExpertCache&&) = default;  // not copied: a policy's history has one owner
    ExpertCache& operator=(ExpertCache&&) = default;

    // One route: distinct experts of ONE bank in the order their slabs are wanted. Unpins the previous route,
    // pins this one, appends the loads to `loads` (capacity reserved by the caller; nothing is allocated here).
    // All hits are used before the first miss is admitted; misses are admitted in the order given. Returns false,
    // changing nothing, when the route is wider than its part's capacity (the caller must cut its batch).
    // An expert in no part counts as a hit and nothing else. When nothing else can leave, a protected speculative
    // expert does, the one issued first: demand outranks a guess. Its read may be in flight; the store waits for it
    // before it takes the frame.
    bool route(std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens, std::vector<Load>& loads);

    // May `expert` be loaded before it is routed? Yes only when it is absent and a frame is free or a victim
    // exists that is neither pinned nor speculative. On yes it becomes speculative and `load` says what to do.
    // A speculative expert is protected from eviction until it is routed or `release_speculative` is called for
    // its bank (its layer has been routed without it), after which it is an ordinary candidate.
    bool speculate(uint32_t expert, Load& load);
    void release_speculative(uint32_t bank);
    // Takes a speculative load back that was never started (its frame becomes free again; a victim stays gone).
    // Throws Error(internal) when `expert` is not speculative.
    void cancel(uint32_t expert);

    void unpin_route();
    // A resident expert that is not pinned leaves; its frame becomes free. Throws Error(usage) when it is not there or
    // pinned by the current route.
    void drop(uint32_t expert);

    // From now on at most `capacity` experts of a part stay, never more than it was made for. Those that had to leave are
    // appended to `left`; where nobody else can leave it stays larger, and as it is where the policy needs what it was
    // made for. Returns the capacity it came to. Between routes.
    uint32_t set_capacity(uint32_t part, uint32_t capacity, std::vector<uint32_t>& left);

    // May it stay once its matmuls are over? The policy's answer; true for an expert in no part.
    bool keep(uint32_t expert) const;

    Residency residency(uint32_t expert) const { return residency_[expert]; }
    bool cached(uint32_t expert) const { return part_of_[expert] != kNone; }  // false: always resident
    const std::vector<Part>& parts() const { return parts_; }
    uint32_t part_of(uint32_t expert) const { return part_of_[expert]; }
    uint32_t bank_of(uint32_t expert) const { return bank_of_[expert]; }
    uint32_t experts() const { return static_cast<uint32_t>(bank_of_.size()); }
    uint32_t resident(uint32_t part) const;  // experts resident or speculative in the part
    const CacheCounters& counters() const { return counters_; }

  private:
    struct PartState;
    void add_part(uint32_t part, std::string_view policy, std::span<const double> priority);
    void validate(uint32_t part) const;
    void use(const RoutedExpert& routed, uint64_t token, uint32_t tokens);
    uint32_t make_room(uint32_t part, uint32_t expert, bool demand);
    void enter(uint32_t expert, Residency as);
    uint32_t evict(uint32_t part, uint32_t local);
    void leave(uint32_t expert);
    void unprotect(size_t position);

    std::vector<Part> parts_;
    std::vector<std::shared_ptr<PartState>> states_;
    std::vector<Residency> residency_;
    std::vector<uint32_t> bank_of_;
    std::vector<uint32_t> part_of_;
    std::vector<uint32_t> local_;   // number inside the part
    std::vector<uint32_t> pinned_;  // the current route
    std::vector<uint32_t> early_;   // speculative and protected, in the order issued
    CacheCounters counters_;
};

}  // namespace moestream
