#include "moestream/recorder.h"

#include <utility>

namespace moestream {

void Recorder::route(uint32_t bank, uint64_t token, uint32_t tokens, uint32_t rows, uint32_t k) {
    ++count_;
    routes_.bank.push_back(bank);
    routes_.token.push_back(token);
    routes_.tokens.push_back(tokens);
    routes_.rows.push_back(rows);
    routes_.k.push_back(k);
    routes_.wishes.push_back(0);
}

void Recorder::wish(std::span<const uint32_t> experts) {
    if (routes_.wishes.empty()) return;  // its route is of a step that was taken already
    routes_.wishes.back() += static_cast<uint32_t>(experts.size());
    routes_.wish_ids.insert(routes_.wish_ids.end(), experts.begin(), experts.end());
}

void Recorder::close(SlabEvent& event) {
    done_.push_back(event);
    event.issued_ns = 0;
}

void Recorder::issued(uint32_t expert, uint32_t slot, SlabKind kind, uint64_t bytes, uint64_t now) {
    SlabEvent& event = open(expert, slot);
    if (event.issued_ns != 0) close(event);
    event = {count_, expert, static_cast<uint8_t>(slot), kind, bytes, now, 0, 0, 0};
}

void Recorder::ready(uint32_t expert, uint32_t slot, uint64_t at) { open(expert, slot).ready_ns = at; }

void Recorder::dropped(uint32_t expert, uint32_t slot) {
    SlabEvent& event = open(expert, slot);
    if (event.issued_ns == 0) return;
    event.kind = SlabKind::dropped;
    event.bytes = 0;
    close(event);
}

void Recorder::needed(uint32_t expert, uint32_t slot, uint64_t at, uint64_t waited_ns) {
    SlabEvent& event = open(expert, slot);
    if (event.issued_ns == 0) return;
    event.needed_ns = at;
    event.waited_ns = waited_ns;
    close(event);
}

Recorder::Taken Recorder::take(bool finish) {
    if (finish) {
        for (auto& event : open_) {
            if (event.issued_ns != 0) close(event);
        }
    }
    return {std::exchange(routes_, {}), std::exchange(done_, {})};
}

}  // namespace moestream
