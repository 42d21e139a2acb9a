#include "shards.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "moestream/direct.h"
#include "moestream/interpose.h"
#include "pages.h"

namespace moestream {
namespace {

constexpr uint64_t kLoadRequest = uint64_t{1} << 20;
constexpr size_t kLoadQueued = 256;

const char* reason(int error) { return error == ENODATA ? "the file ends early" : std::strerror(error); }

// As much from `begin` on as may be locked: halves tell how far a limit goes. `error`: what ended it.
uint64_t lock_pages(char* begin, uint64_t bytes, int& error) {
    if (mlock(begin, bytes) == 0) return bytes;
    error = errno;
    if (bytes <= kPage) return 0;
    const uint64_t half = bytes / kPage / 2 * kPage;
    const uint64_t first = lock_pages(begin, half, error);
    return first < half ? first : half + lock_pages(begin + half, bytes - half, error);
}

// What this process has locked counts against its limit.
uint64_t locked_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        unsigned long kilobytes = 0;
        if (std::sscanf(line.c_str(), "VmLck: %lu kB", &kilobytes) == 1) return uint64_t{kilobytes} << 10;
    }
    return 0;
}

bool lock_limited() {
    rlimit limit{};
    return getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

}  // namespace

ShardedStore::ShardedStore(const SlabIndex& index, StoreOptions options)
    : Store(index), geometry_(index), options_(std::move(options)), regions_(index.shards().size()) {
    for (uint32_t s = 0; s < regions_.size(); ++s) regions_[s].bytes = regions_[s].end = index.shards()[s].bytes;
}

ShardedStore::~ShardedStore() {
    for (auto& region : regions_) {
        region.watch.reset();
        if (region.base != nullptr && !region.foreign) {
            forget_region(region.base);
            release(region.base, region.bytes);
        }
        if (region.fd >= 0 && region.fd != region.buffered_fd) close(region.fd);
        if (region.buffered_fd >= 0) close(region.buffered_fd);
    }
}

void ShardedStore::open_shards(bool direct) {
    std::map<std::string, std::vector<std::string>> refused;  // by the reason, so that each is said once
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& path = index_.shards()[s].path;
        auto& region = regions_[s];
        region.buffered_fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (region.buffered_fd < 0) throw Error(ErrorKind::refused, path + ": " + why_not_opened(errno));
        region.fd = region.buffered_fd;
        // What is kept takes memory: no more than the slabs that were asked for.
        if (options_.keep_cached) {
            require_advice(s, "POSIX_FADV_RANDOM", posix_fadvise(region.buffered_fd, 0, 0, POSIX_FADV_RANDOM));
        }
        if (!direct) continue;
        const DirectReads opened = open_direct(path);
        if (opened.fd >= 0) region.fd = opened.fd;
        else refused[opened.refusal].push_back(path);
    }
    for (const auto& [reason, paths] : refused) {
        const size_t others = paths.size() - 1;
        options_.fallback("O_DIRECT is refused on " + paths.front() +
                          (others > 0 ? " and " + std::to_string(others) + " more" : "") + " (" + reason +
                          "): buffered reads, dropped from the page cache after use");
    }
}

Store::Place ShardedStore::place(const void* address) const {
    const auto* byte = static_cast<const char*>(address);
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& region = regions_[s];
        if (region.base == nullptr || byte < region.base || byte >= region.base + region.bytes) continue;
        const uint32_t tensor = index_.tensor_at(s, static_cast<uint64_t>(byte - region.base));
        if (tensor == kNone) return {};
        return {tensor, index_.tensors()[tensor].bank};
    }
    return {};
}

std::vector<Geometry::Range> ShardedStore::resident(uint32_t shard) const {
    std::vector<Geometry::Range> ranges;
    for (const auto& range : geometry_.resident(shard)) {
        const uint64_t begin = std::max(range.begin, regions_[shard].begin);
        const uint64_t end = std::min(range.end, regions_[shard].end);
        if (begin < end) ranges.push_back({begin, end});
    }
    return ranges;
}

void ShardedStore::use(uint32_t shard, const Mapping& mapping) {
    auto& region = regions_[shard];
    region.base = mapping.base;
    region.begin = mapping.begin;
    region.end = std::min(mapping.end, region.bytes);
    region.foreign = true;
}

void ShardedStore::overlay(uint32_t shard, const Mapping& mapping) {
    use(shard, mapping);
    reserve(mapping.end - mapping.begin, kPage, mapping.base + mapping.begin, options_.closed);
}

void ShardedStore::watch(uint32_t shard) {
    const auto& region = regions_[shard];
    const uint64_t end = (region.end + kPage - 1) / kPage * kPage;
    regions_[shard].watch = std::make_unique<FaultWatch>(region.base + region.begin, end - region.begin);
}

void ShardedStore::begin_step() {
    if (std::any_of(regions_.begin(), regions_.end(), [](const Region& region) { return region.watch != nullptr; })) {
        FaultWatch::stay_in_front();
    }
}

const std::optional<Failure>& ShardedStore::failure() const {
    for (uint32_t s = 0; s < regions_.size() && !failure_; ++s) {
        if (regions_[s].watch == nullptr) continue;
        if (const auto at = regions_[s].watch->failed_at()) failure_ = lost_page(s, regions_[s].begin + *at);
    }
    return failure_;
}

Failure ShardedStore::lost_page(uint32_t shard, uint64_t offset) const {
    const auto [error, why] = why_lost(shard, offset);
    Failure failure{error, index_.shards()[shard].path + " at byte " + std::to_string(offset)};
    const uint32_t t = index_.tensor_at(shard, offset);
    if (t == kNone) {
        failure.dense_at = {shard, offset};
    } else {
        const auto& tensor = index_.tensors()[t];
        failure.what += " (" + tensor.name + ", expert " + std::to_string((offset - tensor.offset) / tensor.slab_bytes) + ")";
    }
    failure.what += ": " + why;
    return failure;
}

std::pair<int, std::string> ShardedStore::why_lost(uint32_t shard, uint64_t offset) const {
    struct stat status {};
    const bool ends = fstat(regions_[shard].buffered_fd, &status) != 0 || static_cast<uint64_t>(status.st_size) <= offset;
    const std::string what = ends ? "the file ends early" : "the page cannot be read";
    return {ends ? ENODATA : EIO, what + "; load the model again when the file is whole"};
}

void ShardedStore::fail(int error, std::string what) {
    if (!failure_) failure_ = Failure{error, std::move(what)};
}

void ShardedStore::fail_read(uint32_t expert, uint32_t slot, const Completion& completion) {
    const auto& tensor = index_.tensors()[index_.banks()[index_.bank_of(expert)].tensors[slot]];
    fail(completion.error, index_.shards()[tensor.shard].path + " at byte " + std::to_string(completion.fail_offset) +
                               " (" + tensor.name + ", expert " + std::to_string(index_.id_of(expert)) + "): " +
                               reason(completion.error));
}

void ShardedStore::require_advice(uint32_t shard, const char* advice, int error) const {
    if (error == 0) return;
    throw Error(ErrorKind::refused, index_.shards()[shard].path + ": the kernel refuses " + advice + " (" +
                                        std::strerror(error) + "), which this mechanism relies on: use arena");
}

void ShardedStore::forget_cached(uint32_t tensor, uint32_t id) {
    const auto& region = regions_[index_.tensors()[tensor].shard];
    if (region.fd != region.buffered_fd || options_.keep_cached) return;
    const int error =
        posix_fadvise(region.fd, static_cast<off_t>(geometry_.movable_offset(tensor, id)),
                      static_cast<off_t>(geometry_.movable_bytes(tensor)), POSIX_FADV_DONTNEED);
    if (error != 0) {
        fail(error, index_.shards()[index_.tensors()[tensor].shard].path +
                        ": what was read stays in the page cache: " + std::strerror(error));
    }
}

// Locking faults pages in, and each fault would read ahead (by megabytes, on some boxes) into slabs that are not
// wanted: enough to fill a cgroup faster than it reclaims. So the ranges are asked for by name first.
void ShardedStore::lock_exactly() {
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& region = regions_[s];
        if (region.base == nullptr || region.locked) continue;
        char* begin = region.base + region.begin;
        require_advice(s, "MADV_RANDOM", madvise(begin, region.end - region.begin, MADV_RANDOM) == 0 ? 0 : errno);
        for (const auto& range : resident(s)) {
            const uint64_t start = range.begin / kPage * kPage;
            const bool taken = madvise(region.base + start, range.end - start, MADV_WILLNEED) == 0;
            require_advice(s, "MADV_WILLNEED", taken ? 0 : errno);
            counters_.dense_bytes += range.end - range.begin;
        }
    }
    lock_resident();
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        const auto& region = regions_[s];
        if (region.base == nullptr) continue;
        char* begin = region.base + region.begin;
        require_advice(s, "MADV_NORMAL", madvise(begin, region.end - region.begin, MADV_NORMAL) == 0 ? 0 : errno);
    }
}

std::unique_ptr<ExpertCache> ShardedStore::make_expert_cache(std::span<const uint32_t> capacities) const {
    std::vector<ExpertCache::Part> parts;
    for (size_t p = 0; p < geometry_.parts().size(); ++p) {
        auto& part = parts.emplace_back();
        part.capacity = capacities[p];
        for (const uint32_t bank : geometry_.parts()[p].banks) {
            const auto& b = index_.banks()[bank];
            for (uint32_t id = 0; id < b.count; ++id) part.experts.push_back(b.first_expert + id);
        }
    }
    std::vector<uint32_t> bank_of(index_.experts());
    for (uint32_t e = 0; e < bank_of.size(); ++e) bank_of[e] = index_.bank_of(e);
    return std::make_unique<ExpertCache>(std::move(parts), std::move(bank_of), options_.policy,
                                         options_.seeds.priority);
}

void ShardedStore::refuse_width(const ExpertCache& cache, uint32_t bank, size_t experts) {
    fail(0, "layer " + std::to_string(index_.banks()[bank].layer) + " needs " + std::to_string(experts) +
                " experts at once and the budget holds " +
                std::to_string(cache.parts()[geometry_.part_of_bank(bank)].capacity) +
                ": use a smaller n_batch or name more memory");
}

void ShardedStore::read_tail(uint32_t shard, uint64_t begin, uint64_t end) {
    auto& region = regions_[shard];
    for (uint64_t at = begin; at < end;) {
        const ssize_t got = pread(region.buffered_fd, region.base + at, end - at, static_cast<off_t>(at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            throw Error(ErrorKind::io, index_.shards()[shard].path + " at byte " + std::to_string(at) + ": " +
                                           (got == 0 ? "the file ends early" : std::strerror(errno)));
        }
        at += static_cast<uint64_t>(got);
    }
}

void ShardedStore::read_range(Reader& reader, uint32_t shard, Geometry::Range range) {
    auto& region = regions_[shard];
    const uint64_t whole = region.bytes / kPage * kPage;
    for (uint64_t at = range.begin; at < std::min(range.end, whole); at += kLoadRequest) {
        const auto bytes = static_cast<uint32_t>(std::min({kLoadRequest, range.end - at, whole - at}));
        reader.submit(Read{region.fd, next_tag_++, at, region.base + at, bytes}, Urgency::demand);
        drain(reader, shard, kLoadQueued);
    }
    if (range.end > whole) read_tail(shard, std::max(range.begin, whole), range.end);
    counters_.dense_bytes += range.end - range.begin;
    if (options_.progress) options_.progress(counters_.dense_bytes, load_total_);
}

void ShardedStore::drain(Reader& reader, uint32_t shard, size_t down_to) {
    std::array<Completion, 64> done;
    while (reader.in_flight() > down_to) {
        const size_t count = reader.reap(done, true);
        for (size_t i = 0; i < count; ++i) {
            if (done[i].error == 0) continue;
            throw Error(ErrorKind::io, index_.shards()[shard].path + " at byte " +
                                           std::to_string(done[i].fail_offset) + ": " + reason(done[i].error));
        }
    }
}

void ShardedStore::read_resident(Reader& reader) {
    if (load_total_ == 0) {
        for (uint32_t s = 0; s < regions_.size(); ++s) {
            for (const auto& range : geometry_.resident(s)) load_total_ += range.end - range.begin;
        }
    }
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        auto& region = regions_[s];
        if (region.base == nullptr || region.loaded) continue;
        for (const auto& range : resident(s)) {
            const uint64_t begin = range.begin / kPage * kPage;
            const int error = options_.closed ? open_pages(region.base + begin, range.end - begin) : 0;
            if (error != 0) throw Error(ErrorKind::refused, std::string("no memory for dense bytes: ") + std::strerror(error));
            read_range(reader, s, range);
        }
        drain(reader, s, 0);
        region.loaded = true;
        if (region.fd == region.buffered_fd) forget_load(s);
    }
}

// Of a load. Where slabs may stay, those that were cached before stay too.
void ShardedStore::forget_load(uint32_t shard) const {
    const int fd = regions_[shard].fd;
    if (!options_.keep_cached) {
        require_advice(shard, "POSIX_FADV_DONTNEED", posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED));
        return;
    }
    for (const auto& range : resident(shard)) {
        require_advice(shard, "POSIX_FADV_DONTNEED",
                       posix_fadvise(fd, static_cast<off_t>(range.begin), static_cast<off_t>(range.end - range.begin),
                                     POSIX_FADV_DONTNEED));
    }
}

void ShardedStore::lock_resident() {
    uint64_t wanted = 0, locked = 0;
    int error = 0;
    const uint64_t before = locked_bytes();
    raise_lock_limit();
    for (uint32_t s = 0; s < regions_.size(); ++s) {
        if (regions_[s].base == nullptr || regions_[s].locked) continue;
        regions_[s].locked = true;
        // Where not all may be locked, what lies first should go without: mostly the table of tokens, of which each
        // token uses one row.
        const auto ranges = to_lock(s);
        for (auto range = ranges.rbegin(); range != ranges.rend(); ++range) {
            const uint64_t begin = range->begin / kPage * kPage;
            const uint64_t bytes = (range->end - begin + kPage - 1) / kPage * kPage;
            wanted += bytes;
            locked += lock_pages(regions_[s].base + begin, bytes, error);
        }
    }
    if (locked == wanted) return;
    const std::string said = "mlock of " + std::to_string(wanted - locked) + " of " + std::to_string(wanted) +
                             " bytes is refused (" + std::strerror(error) + "): ";
    const std::string enough = std::to_string(before + wanted);
    options_.fallback(said + (lock_limited() ? "`ulimit -l " + std::to_string((before + wanted + 1023) / 1024) +
                                                   "` (systemd: LimitMEMLOCK=" + enough +
                                                   ", docker: --ulimit memlock=" + enough + ") is enough"
                                             : "no limit forbids it, the memory is not to be had"));
}

}  // namespace moestream
