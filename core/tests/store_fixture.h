// What the stores' tests share: a small model of two shards, and one layer run as the hook runs it, every byte checked.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "moestream/geometry.h"
#include "moestream/store.h"

namespace moestream::test {

// A file with a name, of bytes that repeat nowhere; gone with the object.
class NamedFile {
  public:
    NamedFile(uint64_t bytes, uint32_t seed) : contents(bytes, '\0') {
        const char* directory = getenv("TMPDIR");
        path = std::string(directory != nullptr ? directory : "/tmp") + "/moestream-arena-XXXXXX";
        close(mkstemp(path.data()));
        std::mt19937 random(seed);
        for (char& byte : contents) byte = static_cast<char>(random());
        restore();
    }
    ~NamedFile() { unlink(path.c_str()); }
    NamedFile(const NamedFile&) = delete;
    NamedFile& operator=(const NamedFile&) = delete;
    void restore() const { std::ofstream(path, std::ios::binary) << contents; }
    void cut(off_t bytes) const { CHECK_EQ(truncate(path.c_str(), bytes), 0); }

    std::string path;
    std::string contents;
};

// Two shards; banks 0 and 1 alike, bank 2 with other sizes and a slab too small to move, bank 3 with none that moves.
struct Model {
    NamedFile first{1 << 20, 1};
    NamedFile second{(1 << 20) + 777, 2};

    SlabIndex index() const {
        return SlabIndex({{first.path, first.contents.size()}, {second.path, second.contents.size()}},
                         {{"0.gate", 0, 0, 1000, 9000, 16},
                          {"0.down", 0, 1, 0, 12288, 16},
                          {"1.gate", 1, 0, 200000, 9000, 16},
                          {"1.down", 1, 1, 200704, 12288, 16},
                          {"2.gate", 2, 0, 400000, 20001, 12},
                          {"2.up", 2, 1, 500001, 100, 12},
                          {"2.down", 2, 1, 600000, 30000, 12},
                          {"3.up", 3, 0, 700000, 3000, 8}},
                         {0, 1, 2, 3});
    }
    const std::string& contents(uint32_t shard) const { return shard == 0 ? first.contents : second.contents; }
};

struct Opened {
    const Model& model;
    SlabIndex index;
    std::unique_ptr<Store> store;
    std::vector<std::string> fallbacks;

    Opened(const Model& model, const std::string& name, StoreOptions options, const std::vector<uint32_t>& capacities)
        : model(model), index(model.index()) {
        options.fallback = [this](const std::string& line) { fallbacks.push_back(line); };
        store = make_store(name, index, options);
        for (uint32_t shard = 0; shard < 2; ++shard) base.push_back(static_cast<char*>(store->region(shard)));
        store->load_dense();
        store->set_capacities(capacities);
    }
    bool slab_is_right(uint32_t tensor, uint32_t id) const {
        const uint32_t shard = index.tensors()[tensor].shard;
        const uint64_t offset = index.slab_offset(tensor, id);
        return std::memcmp(base[shard] + offset, model.contents(shard).data() + offset,
                           index.tensors()[tensor].slab_bytes) == 0;
    }
    bool resident_is_right() const {
        const Geometry geometry(index);
        for (uint32_t shard = 0; shard < 2; ++shard) {
            for (const auto& range : geometry.resident(shard)) {
                if (std::memcmp(base[shard] + range.begin, model.contents(shard).data() + range.begin,
                                range.end - range.begin) != 0) {
                    return false;
                }
            }
        }
        return true;
    }
    // One layer as the hook runs it: route, then each tensor's matmul. False when a read failed.
    bool layer(uint32_t bank, const std::vector<uint32_t>& ids, uint64_t token, const std::vector<uint32_t>& early) {
        std::vector<RoutedExpert> routed;
        for (const uint32_t id : ids) routed.push_back({index.banks()[bank].first_expert + id, 1});
        if (!store->route(bank, routed, token, 1)) return false;
        for (const uint32_t tensor : index.banks()[bank].tensors) {
            if (!store->wait(tensor)) return false;
            CHECK(!store->pending(tensor));
            for (const uint32_t id : ids) CHECK(slab_is_right(tensor, id));
            if (store->demand_idle()) store->speculate(early);
            for (const uint32_t id : ids) CHECK(slab_is_right(tensor, id));  // nothing routed was taken away
        }
        return true;
    }

    std::vector<char*> base;
};

inline std::vector<uint32_t> choose(std::mt19937& random, uint32_t count, uint32_t of) {
    std::vector<uint32_t> ids(of);
    for (uint32_t id = 0; id < of; ++id) ids[id] = id;
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(count);
    std::sort(ids.begin(), ids.end());
    return ids;
}

inline bool uring_works() {
    try {
        make_reader("uring", {});
        return true;
    } catch (const Error& error) {
        std::fprintf(stderr, "io_uring is not tested: %s\n", error.what());
        return false;
    }
}

}  // namespace moestream::test
