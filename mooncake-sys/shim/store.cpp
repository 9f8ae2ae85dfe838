// The one door between Rust and a Mooncake Store client, whichever way it was loaded.
//
// As in shim.cpp two sources have the same functions: a library that exports Mooncake's C interface (store_c.h), and a pip
// wheel's store.so, which exports only the C++ class behind it. No C++ exception leaves this file.

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common.h"

namespace {

using namespace moonring;

// As in Mooncake's store_c.h.
struct Replicate {
    size_t replicas;
    int soft_pin;
    int hard_pin;
    const char **preferred_segments;
    size_t preferred_segments_count;
};
static_assert(sizeof(Replicate) == 32, "mooncake_replicate_config");

// One key of a batch, and the ranges that its value is spread over.
struct Item {
    const char *key;
    const Buffer *slices;
    size_t count;
};
static_assert(sizeof(Item) == 24, "StoreItem");

struct Setup {
    const char *local_hostname;
    const char *metadata_server;
    uint64_t segment_bytes;
    uint64_t buffer_bytes;
    const char *protocol;
    const char *device;
    const char *master;
};
static_assert(sizeof(Setup) == 56, "Setup");

// Making the first client in a process without Python blocks SIGINT, SIGTERM, SIGHUP and SIGUSR1 in the calling thread, for a
// thread of Mooncake's that waits for them. That is not Mooncake's decision: the caller gets its mask back.
class SignalMask {
  public:
    SignalMask() { pthread_sigmask(SIG_SETMASK, nullptr, &mask_); }
    ~SignalMask() { pthread_sigmask(SIG_SETMASK, &mask_, nullptr); }
    SignalMask(const SignalMask &) = delete;

  private:
    sigset_t mask_;
};

class StoreSource {
  public:
    virtual ~StoreSource() = default;
    virtual void *create() = 0;
    virtual void destroy(void *store) = 0;
    virtual int setup(void *store, const Setup &setup) = 0;
    virtual int enroll(void *store, void *addr, size_t length) = 0;
    virtual int withdraw(void *store, void *addr) = 0;
    // Bytes, or a negative code.
    virtual int64_t get(void *store, const char *key, const Buffer &into) = 0;
    virtual int put(void *store, const char *key, const Buffer &from, size_t replicas) = 0;
    // Each item has one slice.
    virtual int get_batch(void *store, const Item *items, size_t count, int64_t *results, Text &text) = 0;
    virtual int put_batch(void *store, const Item *items, size_t count, size_t replicas, int64_t *results,
                          Text &text) = 0;
    virtual int get_multi(void *store, const Item *items, size_t count, int64_t *results, Text &text) = 0;
    virtual int put_multi(void *store, const Item *items, size_t count, size_t replicas, int64_t *results,
                          Text &text) = 0;
    virtual int exists(void *store, const char *key) = 0;
    virtual int exists_batch(void *store, const char *const *keys, size_t count, int64_t *results, Text &text) = 0;
    virtual int64_t size(void *store, const char *key) = 0;
    virtual int remove(void *store, const char *key, bool force) = 0;
};

// A library that exports the C interface.
class CInterface final : public StoreSource {
  public:
    explicit CInterface(Lookup &find) {
        find(create_, "mooncake_store_create");
        find(destroy_, "mooncake_store_destroy");
        find(setup_, "mooncake_store_setup");
        find(enroll_, "mooncake_store_register_buffer");
        find(withdraw_, "mooncake_store_unregister_buffer");
        find(get_, "mooncake_store_get_into");
        find(put_, "mooncake_store_put_from");
        find(get_batch_, "mooncake_store_batch_get_into");
        find(put_batch_, "mooncake_store_batch_put_from");
        find(exists_, "mooncake_store_is_exist");
        find(exists_batch_, "mooncake_store_batch_is_exist");
        find(size_, "mooncake_store_get_size");
        find(remove_, "mooncake_store_remove");
    }

    void *create() override { return create_(); }
    void destroy(void *store) override { destroy_(store); }
    int setup(void *store, const Setup &s) override {
        return setup_(store, s.local_hostname, s.metadata_server, s.segment_bytes, s.buffer_bytes, s.protocol, s.device,
                      s.master);
    }
    int enroll(void *store, void *addr, size_t length) override { return enroll_(store, addr, length); }
    int withdraw(void *store, void *addr) override { return withdraw_(store, addr); }
    int64_t get(void *store, const char *key, const Buffer &into) override {
        return get_(store, key, into.addr, into.length);
    }
    int put(void *store, const char *key, const Buffer &from, size_t replicas) override {
        Replicate config = replicate(replicas);
        return put_(store, key, from.addr, from.length, &config);
    }
    int get_batch(void *store, const Item *items, size_t count, int64_t *results, Text &) override {
        Columns columns(items, count);
        return get_batch_(store, columns.keys.data(), columns.addrs.data(), columns.lengths.data(), count, results);
    }
    int put_batch(void *store, const Item *items, size_t count, size_t replicas, int64_t *results, Text &) override {
        Columns columns(items, count);
        Replicate config = replicate(replicas);
        std::vector<int> codes(count);
        int code = put_batch_(store, columns.keys.data(), columns.addrs.data(), columns.lengths.data(), count, &config,
                              codes.data());
        if (!code) std::copy(codes.begin(), codes.end(), results);
        return code;
    }
    int get_multi(void *, const Item *, size_t, int64_t *, Text &text) override { return without(text); }
    int put_multi(void *, const Item *, size_t, size_t, int64_t *, Text &text) override { return without(text); }
    int exists(void *store, const char *key) override { return exists_(store, key); }
    int exists_batch(void *store, const char *const *keys, size_t count, int64_t *results, Text &) override {
        std::vector<int> answers(count);
        int code = exists_batch_(store, const_cast<const char **>(keys), count, answers.data());
        if (!code) std::copy(answers.begin(), answers.end(), results);
        return code;
    }
    int64_t size(void *store, const char *key) override { return size_(store, key); }
    int remove(void *store, const char *key, bool force) override { return remove_(store, key, force); }

  private:
    struct Columns {
        std::vector<const char *> keys;
        std::vector<void *> addrs;
        std::vector<size_t> lengths;
        Columns(const Item *items, size_t count) {
            keys.reserve(count), addrs.reserve(count), lengths.reserve(count);
            for (size_t i = 0; i < count; i++) {
                keys.push_back(items[i].key);
                addrs.push_back(items[i].slices->addr);
                lengths.push_back(items[i].slices->length);
            }
        }
    };

    static Replicate replicate(size_t replicas) { return Replicate{replicas, 0, 0, nullptr, 0}; }
    static int without(Text &text) {
        text.set("the C interface has no calls with several buffers for a key");
        return kNoCode;
    }

    void *(*create_)();
    void (*destroy_)(void *);
    int (*setup_)(void *, const char *, const char *, uint64_t, uint64_t, const char *, const char *, const char *);
    int (*enroll_)(void *, void *, size_t);
    int (*withdraw_)(void *, void *);
    int64_t (*get_)(void *, const char *, void *, size_t);
    int (*put_)(void *, const char *, void *, size_t, const Replicate *);
    int (*get_batch_)(void *, const char **, void **, const size_t *, size_t, int64_t *);
    int (*put_batch_)(void *, const char **, void **, const size_t *, size_t, const Replicate *, int *);
    int (*exists_)(void *, const char *);
    int (*exists_batch_)(void *, const char **, size_t, int *);
    int64_t (*size_)(void *, const char *);
    int (*remove_)(void *, const char *, int);
};

using String = std::string;
using Strings = std::vector<String>;
template <class T>
using Lists = std::vector<std::vector<T>>;

// ReplicateConfig, known by its first word, the number of replicas. What follows differs between versions; all of it is off or
// empty when it is zero, strings included, which Mooncake only copies and measures.
struct alignas(64) Config {
    size_t replicas;
    unsigned char rest[1024 - sizeof(size_t)] = {};
    explicit Config(size_t n) : replicas(n) {}
};

// A wheel's store.so.
class Wheel final : public StoreSource {
  public:
    explicit Wheel(Lookup &find) {
#define CLASS "_ZN8mooncake10RealClient"
#define STRING "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
#define STRINGS "RKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS7_EE"
#define LISTS STRINGS "RKS1_IS1_IPvSaISC_EESaISE_EERKS1_IS1_ImSaImEESaISK_EE"
        find(create_, CLASS "6createEv");
        find(setup_, CLASS "10setup_realE" STRING "S8_mmS8_S8_S8_RKSt10shared_ptrINS_14TransferEngineEES8_bS8_S8_bi");
        find(tear_down_, CLASS "11tearDownAllEv");
        find(enroll_, CLASS "15register_bufferEPvm");
        find(withdraw_, CLASS "17unregister_bufferEPv");
        find(get_, CLASS "8get_intoE" STRING "Pvm");
        find(put_, CLASS "8put_fromE" STRING "PvmRKNS_15ReplicateConfigE");
        find(get_batch_, CLASS "14batch_get_intoE" STRINGS "RKS1_IPvSaISC_EERKS1_ImSaImEE");
        find(put_batch_, CLASS "14batch_put_fromE" STRINGS "RKS1_IPvSaISC_EERKS1_ImSaImEERKNS_15ReplicateConfigE");
        find(get_multi_, CLASS "28batch_get_into_multi_buffersE" LISTS "b");
        find(put_multi_, CLASS "28batch_put_from_multi_buffersE" LISTS "RKNS_15ReplicateConfigE");
        find(exists_, CLASS "7isExistE" STRING);
        find(exists_batch_, CLASS "12batchIsExistE" STRINGS);
        find(size_, CLASS "7getSizeE" STRING);
        find(remove_, CLASS "6removeE" STRING "b");
#undef CLASS
#undef STRING
#undef STRINGS
#undef LISTS
    }

    void *create() override {
        Client client = create_();
        return client ? new Client(std::move(client)) : nullptr;
    }
    void destroy(void *store) override {
        std::unique_ptr<Client> client(static_cast<Client *>(store));
        tear_down_(client->get());
    }
    int setup(void *store, const Setup &s) override {
        // The client makes an engine of its own; no local socket, no disk, no HTTP server.
        return setup_(at(store), s.local_hostname, s.metadata_server, s.segment_bytes, s.buffer_bytes, s.protocol, s.device,
                      s.master, Client(), "", false, "", "default", false, 0);
    }
    int enroll(void *store, void *addr, size_t length) override { return enroll_(at(store), addr, length); }
    int withdraw(void *store, void *addr) override { return withdraw_(at(store), addr); }
    int64_t get(void *store, const char *key, const Buffer &into) override {
        return get_(at(store), key, into.addr, into.length);
    }
    int put(void *store, const char *key, const Buffer &from, size_t replicas) override {
        return put_(at(store), key, from.addr, from.length, Config(replicas));
    }
    int get_batch(void *store, const Item *items, size_t count, int64_t *results, Text &text) override {
        Columns columns(items, count);
        return told(get_batch_(at(store), columns.keys, columns.addrs, columns.lengths), count, results, text);
    }
    int put_batch(void *store, const Item *items, size_t count, size_t replicas, int64_t *results,
                  Text &text) override {
        Columns columns(items, count);
        return told(put_batch_(at(store), columns.keys, columns.addrs, columns.lengths, Config(replicas)), count, results,
                    text);
    }
    int get_multi(void *store, const Item *items, size_t count, int64_t *results, Text &text) override {
        Tables tables(items, count);
        return told(get_multi_(at(store), tables.keys, tables.addrs, tables.lengths, false), count, results, text);
    }
    int put_multi(void *store, const Item *items, size_t count, size_t replicas, int64_t *results,
                  Text &text) override {
        Tables tables(items, count);
        return told(put_multi_(at(store), tables.keys, tables.addrs, tables.lengths, Config(replicas)), count, results,
                    text);
    }
    int exists(void *store, const char *key) override { return exists_(at(store), key); }
    int exists_batch(void *store, const char *const *keys, size_t count, int64_t *results, Text &text) override {
        return told(exists_batch_(at(store), Strings(keys, keys + count)), count, results, text);
    }
    int64_t size(void *store, const char *key) override { return size_(at(store), key); }
    int remove(void *store, const char *key, bool force) override { return remove_(at(store), key, force); }

  private:
    using Client = std::shared_ptr<void>;

    static void *at(void *store) { return static_cast<Client *>(store)->get(); }

    struct Columns {
        Strings keys;
        std::vector<void *> addrs;
        std::vector<size_t> lengths;
        Columns(const Item *items, size_t count) {
            keys.reserve(count), addrs.reserve(count), lengths.reserve(count);
            for (size_t i = 0; i < count; i++) {
                keys.emplace_back(items[i].key);
                addrs.push_back(items[i].slices->addr);
                lengths.push_back(items[i].slices->length);
            }
        }
    };
    struct Tables {
        Strings keys;
        Lists<void *> addrs;
        Lists<size_t> lengths;
        Tables(const Item *items, size_t count) : addrs(count), lengths(count) {
            keys.reserve(count);
            for (size_t i = 0; i < count; i++) {
                keys.emplace_back(items[i].key);
                for (size_t j = 0; j < items[i].count; j++) {
                    addrs[i].push_back(items[i].slices[j].addr);
                    lengths[i].push_back(items[i].slices[j].length);
                }
            }
        }
    };

    template <class T>
    static int told(const std::vector<T> &answers, size_t count, int64_t *results, Text &text) {
        if (answers.size() != count) {
            text.set((std::to_string(answers.size()) + " answers for " + std::to_string(count) + " keys").c_str());
            return kNoCode;
        }
        std::copy(answers.begin(), answers.end(), results);
        return 0;
    }

    Client (*create_)();
    int (*setup_)(void *, const String &, const String &, size_t, size_t, const String &, const String &, const String &,
                  const Client &, const String &, bool, const String &, const String &, bool, int);
    int (*tear_down_)(void *);
    int (*enroll_)(void *, void *, size_t);
    int (*withdraw_)(void *, void *);
    int64_t (*get_)(void *, const String &, void *, size_t);
    int (*put_)(void *, const String &, void *, size_t, const Config &);
    std::vector<int64_t> (*get_batch_)(void *, const Strings &, const std::vector<void *> &, const std::vector<size_t> &);
    std::vector<int> (*put_batch_)(void *, const Strings &, const std::vector<void *> &, const std::vector<size_t> &,
                                   const Config &);
    std::vector<int> (*get_multi_)(void *, const Strings &, const Lists<void *> &, const Lists<size_t> &, bool);
    std::vector<int> (*put_multi_)(void *, const Strings &, const Lists<void *> &, const Lists<size_t> &, const Config &);
    int (*exists_)(void *, const String &);
    std::vector<int> (*exists_batch_)(void *, const Strings &);
    int64_t (*size_)(void *, const String &);
    int (*remove_)(void *, const String &, bool);
};

template <class S>
int made(Lookup &find, StoreSource **source, Text &text) {
    auto made = std::make_unique<S>(find);
    if (!find.missing().empty()) {
        text.set(find.missing().c_str());
        return kNoCode;
    }
    *source = made.release();
    return 0;
}

// Splits an answer that is a number or a negative code.
int split(int64_t answer, int64_t *number) {
    if (answer < 0) return answer < INT_MIN ? kNoCode : static_cast<int>(answer);
    *number = answer;
    return 0;
}

}  // namespace

// Each returns 0, Mooncake's code, kException or kNoCode; with any but 0, `text` says what there is to say.
extern "C" {

// Missing names end up in `text`.
int moonring_store_source(void *handle, bool wheel, StoreSource **source, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) {
        Lookup find(handle);
        return wheel ? made<Wheel>(find, source, t) : made<CInterface>(find, source, t);
    });
}
int moonring_store_create(StoreSource *s, void **store, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) {
        SignalMask kept;
        *store = s->create();
        return *store ? 0 : kNoCode;
    });
}
int moonring_store_destroy(StoreSource *s, void *store, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->destroy(store), 0; });
}
int moonring_store_setup(StoreSource *s, void *store, const Setup *setup, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->setup(store, *setup); });
}
int moonring_store_register(StoreSource *s, void *store, void *addr, size_t length, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->enroll(store, addr, length); });
}
int moonring_store_unregister(StoreSource *s, void *store, void *addr, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->withdraw(store, addr); });
}
int moonring_store_get(StoreSource *s, void *store, const char *key, const Buffer *into, int64_t *bytes, char *text,
                       size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return split(s->get(store, key, *into), bytes); });
}
int moonring_store_put(StoreSource *s, void *store, const char *key, const Buffer *from, size_t replicas, char *text,
                       size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->put(store, key, *from, replicas); });
}
int moonring_store_get_batch(StoreSource *s, void *store, const Item *items, size_t count, bool multi, int64_t *results,
                             char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) {
        return multi ? s->get_multi(store, items, count, results, t) : s->get_batch(store, items, count, results, t);
    });
}
int moonring_store_put_batch(StoreSource *s, void *store, const Item *items, size_t count, bool multi, size_t replicas,
                             int64_t *results, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) {
        return multi ? s->put_multi(store, items, count, replicas, results, t)
                     : s->put_batch(store, items, count, replicas, results, t);
    });
}
int moonring_store_exists(StoreSource *s, void *store, const char *key, int64_t *answer, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return split(s->exists(store, key), answer); });
}
int moonring_store_exists_batch(StoreSource *s, void *store, const char *const *keys, size_t count, int64_t *results,
                                char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) { return s->exists_batch(store, keys, count, results, t); });
}
int moonring_store_size(StoreSource *s, void *store, const char *key, int64_t *bytes, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return split(s->size(store, key), bytes); });
}
int moonring_store_remove(StoreSource *s, void *store, const char *key, bool force, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->remove(store, key, force); });
}
}
