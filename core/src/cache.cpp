#include "moestream/cache.h"

#include <algorithm>
#include <map>
#include <string>

#include "moestream/error.h"

namespace moestream {

struct ExpertCache::PartState {
    std::unique_ptr<Policy> policy;
    uint32_t resident = 0;  // speculative ones too
    uint32_t planned = 0;   // the capacity the policy was made for
};

ExpertCache::ExpertCache(std::vector<Part> parts, std::vector<uint32_t> bank_of, std::string_view policy,
                         std::span<const double> priority)
    : parts_(std::move(parts)),
      residency_(bank_of.size(), Residency::absent),
      bank_of_(std::move(bank_of)),
      part_of_(bank_of_.size(), kNone),
      local_(bank_of_.size(), kNone) {
    if (!priority.empty() && priority.size() != bank_of_.size())
        throw Error(ErrorKind::usage, "cache: a seed of " + std::to_string(priority.size()) + " priorities for " +
                                          std::to_string(bank_of_.size()) + " experts");
    size_t experts = 0, widest = 0;
    for (uint32_t part = 0; part < parts_.size(); ++part) {
        validate(part);
        add_part(part, policy, priority);
        experts += parts_[part].experts.size();
        widest = std::max<size_t>(widest, parts_[part].capacity);
    }
    std::map<uint32_t, uint32_t> part_of_bank;
    for (uint32_t expert = 0; expert < bank_of_.size(); ++expert) {
        if (!cached(expert)) continue;
        const auto [it, added] = part_of_bank.emplace(bank_of_[expert], part_of_[expert]);
        if (!added && it->second != part_of_[expert])
            throw Error(ErrorKind::usage, "cache: bank " + std::to_string(it->first) + " is in two parts");
    }
    pinned_.reserve(widest);
    early_.reserve(experts);
}

void ExpertCache::validate(uint32_t part) const {
    const Part& p = parts_[part];
    const std::string name = "cache: part " + std::to_string(part);
    if (p.capacity < 1 || p.capacity > p.experts.size())
        throw Error(ErrorKind::usage, name + " holds " + std::to_string(p.experts.size()) +
                                          " experts, its capacity cannot be " + std::to_string(p.capacity));
    for (size_t i = 0; i < p.experts.size(); ++i) {
        const uint32_t expert = p.experts[i];
        const std::string named = name + ": expert " + std::to_string(expert);
        if (expert >= bank_of_.size()) throw Error(ErrorKind::usage, named + " has no bank");
        if (i > 0 && expert <= p.experts[i - 1]) throw Error(ErrorKind::usage, named + " is not in ascending order");
        if (cached(expert)) throw Error(ErrorKind::usage, named + " is in another part too");
    }
}

void ExpertCache::add_part(uint32_t part, std::string_view policy, std::span<const double> priority) {
    const Part& p = parts_[part];
    std::map<uint32_t, uint32_t> dense;  // global bank -> bank inside the part, in the same order
    for (const uint32_t expert : p.experts) dense.emplace(bank_of_[expert], 0);
    uint32_t banks = 0;
    for (auto& [bank, number] : dense) number = banks++;
    PolicyShape shape{static_cast<uint32_t>(p.experts.size()), p.capacity, {}, banks, {}};
    for (const uint32_t expert : p.experts) {
        part_of_[expert] = part;
        local_[expert] = static_cast<uint32_t>(shape.bank_of.size());
        shape.bank_of.push_back(dense[bank_of_[expert]]);
        if (!priority.empty()) shape.priority.push_back(priority[expert]);
    }
    states_.push_back(std::make_shared<PartState>(PartState{make_policy(policy, shape), 0, p.capacity}));
}

bool ExpertCache::route(std::span<const RoutedExpert> experts, uint64_t token, uint32_t tokens,
                        std::vector<Load>& loads) {
    uint32_t part = kNone, width = 0;
    for (const RoutedExpert& routed : experts) {
        if (!cached(routed.expert)) continue;
        part = part_of_[routed.expert];
        ++width;
    }
    if (part != kNone && width > parts_[part].capacity) return false;

    unpin_route();
    const size_t first_load = loads.size();
    for (const RoutedExpert& routed : experts) {
        if (!cached(routed.expert)) {
            ++counters_.hits;
        } else if (residency_[routed.expert] != Residency::absent) {
            ++counters_.hits;
            use(routed, token, tokens);
        } else {
            loads.push_back({routed.expert, kNone});  // its victim is found when all hits are safe
        }
    }
    size_t load = first_load;
    for (const RoutedExpert& routed : experts) {
        if (load == loads.size() || loads[load].expert != routed.expert) continue;
        ++counters_.misses;
        loads[load++].victim = make_room(part, routed.expert, true);
        enter(routed.expert, Residency::resident);
        use(routed, token, tokens);
    }
    return true;
}

// A present expert is used by the route and pinned.
void ExpertCache::use(const RoutedExpert& routed, uint64_t token, uint32_t tokens) {
    const uint32_t expert = routed.expert;
    if (residency_[expert] == Residency::speculative) {
        ++counters_.speculative_used;
        residency_[expert] = Residency::resident;
        const auto early = std::find(early_.begin(), early_.end(), expert);
        if (early != early_.end()) early_.erase(early);
    }
    Policy& policy = *states_[part_of_[expert]]->policy;
    policy.pin(local_[expert], true);
    policy.use(local_[expert], {token, tokens, routed.count});
    pinned_.push_back(expert);
}

// Evicts if the part is full, and says whom: kNone when a frame is free. Without `demand` nobody protected leaves:
// `expert` itself is returned when that leaves no victim.
uint32_t ExpertCache::make_room(uint32_t part, uint32_t expert, bool demand) {
    PartState& state = *states_[part];
    if (state.resident < parts_[part].capacity) return kNone;
    uint32_t local = state.policy->victim(local_[expert]);
    if (local == kNone) {
        if (!demand) return expert;
        size_t first = 0;
        while (first < early_.size() && part_of_[early_[first]] != part) ++first;
        if (first == early_.size()) throw Error(ErrorKind::internal, "cache: a full part has no victim");
        local = local_[early_[first]];
        unprotect(first);
    }
    return evict(part, local);
}

uint32_t ExpertCache::evict(uint32_t part, uint32_t local) {
    const uint32_t victim = parts_[part].experts[local];
    ++counters_.evictions;
    if (residency_[victim] == Residency::speculative) ++counters_.speculative_wasted;
    leave(victim);
    return victim;
}

void ExpertCache::leave(uint32_t expert) {
    PartState& state = *states_[part_of_[expert]];
    residency_[expert] = Residency::absent;
    state.policy->forget(local_[expert]);
    --state.resident;
}

void ExpertCache::enter(uint32_t expert, Residency as) {
    PartState& state = *states_[part_of_[expert]];
    state.policy->pin(local_[expert], true);  // before it is there: it is never a candidate in between
    state.policy->admit(local_[expert]);
    residency_[expert] = as;
    ++state.resident;
}

bool ExpertCache::speculate(uint32_t expert, Load& load) {
    if (!cached(expert) || residency_[expert] != Residency::absent) return false;
    const uint32_t victim = make_room(part_of_[expert], expert, false);
    if (victim == expert) return false;
    enter(expert, Residency::speculative);
    early_.push_back(expert);
    ++counters_.speculative_issued;
    load = {expert, victim};
    return true;
}

void ExpertCache::unprotect(size_t position) {
    const uint32_t expert = early_[position];
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(position));
    states_[part_of_[expert]]->policy->pin(local_[expert], false);
}

void ExpertCache::release_speculative(uint32_t bank) {
    for (size_t i = 0; i < early_.size();) {
        if (bank_of_[early_[i]] == bank) {
            unprotect(i);
        } else {
            ++i;
        }
    }
}

void ExpertCache::cancel(uint32_t expert) {
    if (residency_[expert] != Residency::speculative)
        throw Error(ErrorKind::internal, "cache: expert " + std::to_string(expert) + " is not speculative");
    const auto early = std::find(early_.begin(), early_.end(), expert);
    if (early != early_.end()) unprotect(static_cast<size_t>(early - early_.begin()));
    leave(expert);
    --counters_.speculative_issued;  // it never was: neither used nor wasted
}

void ExpertCache::unpin_route() {
    for (const uint32_t expert : pinned_) states_[part_of_[expert]]->policy->pin(local_[expert], false);
    pinned_.clear();
}

void ExpertCache::drop(uint32_t expert) {
    if (!cached(expert) || residency_[expert] != Residency::resident ||
        std::find(pinned_.begin(), pinned_.end(), expert) != pinned_.end()) {
        throw Error(ErrorKind::usage, "cache: expert " + std::to_string(expert) + " is not there to be dropped");
    }
    leave(expert);
}

uint32_t ExpertCache::set_capacity(uint32_t part, uint32_t capacity, std::vector<uint32_t>& left) {
    unpin_route();
    PartState& state = *states_[part];
    if (!state.policy->elastic()) return parts_[part].capacity;
    capacity = std::clamp(capacity, 1u, state.planned);
    while (state.resident > capacity) {
        const uint32_t local = state.policy->victim(0);
        if (local == kNone) break;
        left.push_back(evict(part, local));
    }
    return parts_[part].capacity = std::max(capacity, state.resident);
}

bool ExpertCache::keep(uint32_t expert) const {
    return !cached(expert) || states_[part_of_[expert]]->policy->keep(local_[expert]);
}

uint32_t ExpertCache::resident(uint32_t part) const { return states_[part]->resident; }

}  // namespace moestream
