// Intrusive lists of experts, each ordered by (stamp, number), oldest first; an expert is in at most one of them.
//
// The stamps belong to the policy. They only grow, and change only through touch() or while the expert is in no
// list. Inserting looks from both ends at once, because that is where experts come back to: a route that is
// unpinned was used last, an early load that was never used is the oldest. Both cost O(1).
#pragma once
#include <cstdint>
#include <vector>

#include "moestream/slab_index.h"

namespace moestream {

class RecencyLists {
  public:
    RecencyLists(uint32_t experts, uint32_t lists) : stamp(experts, 0), experts_(experts), links_(experts + lists) {
        for (uint32_t list = 0; list < lists; ++list) links_[experts + list] = {experts + list, experts + list};
    }

    bool empty(uint32_t list) const { return links_[experts_ + list].next == experts_ + list; }
    uint32_t oldest(uint32_t list) const { return empty(list) ? kNone : links_[experts_ + list].next; }

    // The member of `list` that comes after `expert`, kNone at its end.
    uint32_t newer(uint32_t list, uint32_t expert) const {
        const uint32_t next = links_[expert].next;
        return next == experts_ + list ? kNone : next;
    }

    void insert(uint32_t list, uint32_t expert) {
        const uint32_t end = experts_ + list;
        uint32_t newer = links_[end].next, older = links_[end].previous;  // of the places still possible
        while (older != end && !before(older, expert) && before(newer, expert)) {
            older = links_[older].previous;
            newer = links_[newer].next;
        }
        link_after(older == end || before(older, expert) ? older : links_[newer].previous, expert);
    }
    void remove(uint32_t expert) {
        const Link link = links_[expert];
        links_[link.previous].next = link.next;
        links_[link.next].previous = link.previous;
    }
    // A listed expert is now the newest of its list.
    void touch(uint32_t list, uint32_t expert, uint64_t now) {
        remove(expert);
        stamp[expert] = now;
        link_after(links_[experts_ + list].previous, expert);
    }

    std::vector<uint64_t> stamp;  // per expert

  private:
    struct Link {
        uint32_t previous = kNone, next = kNone;
    };
    bool before(uint32_t a, uint32_t b) const { return stamp[a] != stamp[b] ? stamp[a] < stamp[b] : a < b; }
    void link_after(uint32_t previous, uint32_t expert) {
        const uint32_t next = links_[previous].next;
        links_[expert] = {previous, next};
        links_[previous].next = expert;
        links_[next].previous = expert;
    }
    uint32_t experts_;
    std::vector<Link> links_;  // experts, then one sentinel a list
};

}  // namespace moestream
