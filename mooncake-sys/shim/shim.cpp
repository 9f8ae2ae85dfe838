// The one door between Rust and a Transfer Engine, whichever way it was loaded.
//
// Two sources have the same functions: a library that exports Mooncake's C interface, and a pip wheel's engine.so, which
// exports only the C++ class behind it. `Source` is their common form; the functions at the end give it a C face. No C++
// exception leaves this file: each becomes the code kException with its text.

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "common.h"

namespace {

using namespace moonring;

// As in Mooncake's transfer_engine_c.h.
struct Request {
    int opcode;
    void *source;
    int32_t target_id;
    uint32_t file_id;
    uint64_t target_offset;
    uint64_t length;
};
static_assert(sizeof(Request) == 40 && offsetof(Request, target_offset) == 24, "transfer_request");

struct TaskStatus {
    int status;
    uint64_t transferred_bytes;
};
static_assert(sizeof(TaskStatus) == 16, "transfer_status");

class Source {
  public:
    virtual ~Source() = default;
    virtual int create(const char *metadata, const char *name, const char *host, uint64_t port, bool discover,
                       void **engine, Text &text) = 0;
    virtual void destroy(void *engine) = 0;
    virtual int local_ip_and_port(void *engine, char *out, size_t capacity) = 0;
    virtual void *install(void *engine, const char *protocol, void **args) = 0;
    virtual int uninstall(void *engine, const char *protocol) = 0;
    virtual int open(void *engine, const char *name, bool fresh, int32_t *segment, Text &text) = 0;
    virtual int close(void *engine, int32_t segment) = 0;
    virtual int remove_local(void *engine, const char *name) = 0;
    virtual int enroll(void *engine, void *addr, size_t length, const char *location, bool remote) = 0;
    virtual int withdraw(void *engine, void *addr) = 0;
    virtual int enroll_batch(void *engine, const Buffer *buffers, size_t count, const char *location) = 0;
    virtual int withdraw_batch(void *engine, void *const *addrs, size_t count) = 0;
    virtual uint64_t allocate(void *engine, size_t size) = 0;
    virtual int submit(void *engine, uint64_t batch, const Request *requests, size_t count, uint64_t first_group,
                       Text &text) = 0;
    virtual int status(void *engine, uint64_t batch, size_t task, TaskStatus *status, Text &text) = 0;
    virtual int free(void *engine, uint64_t batch, Text &text) = 0;
    virtual int sync(void *engine) = 0;
};

// A library that exports the C interface.
class CInterface final : public Source {
  public:
    explicit CInterface(Lookup &find) {
        find(create_, "createTransferEngine");
        find(destroy_, "destroyTransferEngine");
        find(local_ip_and_port_, "getLocalIpAndPort");
        find(install_, "installTransport");
        find(uninstall_, "uninstallTransport");
        find(open_, "openSegment");
        find(open_fresh_, "openSegmentNoCache");
        find(close_, "closeSegment");
        find(remove_local_, "removeLocalSegment");
        find(enroll_, "registerLocalMemory");
        find(withdraw_, "unregisterLocalMemory");
        find(enroll_batch_, "registerLocalMemoryBatch");
        find(withdraw_batch_, "unregisterLocalMemoryBatch");
        find(allocate_, "allocateBatchID");
        find(submit_, "submitTransfer");
        find(status_, "getTransferStatus");
        find(free_, "freeBatchID");
        find(sync_, "syncSegmentCache");
    }

    int create(const char *metadata, const char *name, const char *host, uint64_t port, bool discover, void **engine,
               Text &text) override {
        *engine = create_(metadata, name, host, port, discover);
        if (*engine) return 0;
        text.set("the C interface does not say why; Mooncake's log does");
        return kNoCode;
    }
    void destroy(void *engine) override { destroy_(engine); }
    int local_ip_and_port(void *engine, char *out, size_t capacity) override {
        return local_ip_and_port_(engine, out, capacity);
    }
    void *install(void *engine, const char *protocol, void **args) override { return install_(engine, protocol, args); }
    int uninstall(void *engine, const char *protocol) override { return uninstall_(engine, protocol); }
    int open(void *engine, const char *name, bool fresh, int32_t *segment, Text &) override {
        *segment = fresh ? open_fresh_(engine, name) : open_(engine, name);
        return *segment < 0 ? *segment : 0;
    }
    int close(void *engine, int32_t segment) override { return close_(engine, segment); }
    int remove_local(void *engine, const char *name) override { return remove_local_(engine, name); }
    int enroll(void *engine, void *addr, size_t length, const char *location, bool remote) override {
        return enroll_(engine, addr, length, location, remote);
    }
    int withdraw(void *engine, void *addr) override { return withdraw_(engine, addr); }
    int enroll_batch(void *engine, const Buffer *buffers, size_t count, const char *location) override {
        return enroll_batch_(engine, const_cast<Buffer *>(buffers), count, location);
    }
    int withdraw_batch(void *engine, void *const *addrs, size_t count) override {
        return withdraw_batch_(engine, const_cast<void **>(addrs), count);
    }
    uint64_t allocate(void *engine, size_t size) override { return allocate_(engine, size); }
    int submit(void *engine, uint64_t batch, const Request *requests, size_t count, uint64_t, Text &) override {
        return submit_(engine, batch, const_cast<Request *>(requests), count);
    }
    int status(void *engine, uint64_t batch, size_t task, TaskStatus *status, Text &) override {
        return status_(engine, batch, task, status);
    }
    int free(void *engine, uint64_t batch, Text &) override { return free_(engine, batch); }
    int sync(void *engine) override { return sync_(engine); }

  private:
    void *(*create_)(const char *, const char *, const char *, uint64_t, int);
    void (*destroy_)(void *);
    int (*local_ip_and_port_)(void *, char *, size_t);
    void *(*install_)(void *, const char *, void **);
    int (*uninstall_)(void *, const char *);
    int32_t (*open_)(void *, const char *);
    int32_t (*open_fresh_)(void *, const char *);
    int (*close_)(void *, int32_t);
    int (*remove_local_)(void *, const char *);
    int (*enroll_)(void *, void *, size_t, const char *, int);
    int (*withdraw_)(void *, void *);
    int (*enroll_batch_)(void *, Buffer *, size_t, const char *);
    int (*withdraw_batch_)(void *, void **, size_t);
    uint64_t (*allocate_)(void *, size_t);
    int (*submit_)(void *, uint64_t, Request *, size_t);
    int (*status_)(void *, uint64_t, size_t, TaskStatus *);
    int (*free_)(void *, uint64_t);
    int (*sync_)(void *);
};

// What the C++ class takes and answers, laid out as the wheels have it.

struct NativeStatus {
    uint16_t code;
    const char *message;
    NativeStatus(const NativeStatus &) = delete;
    ~NativeStatus() { delete[] message; }
};
static_assert(sizeof(NativeStatus) == 16, "mooncake::Status");

struct Request48 {
    int opcode;
    void *source;
    uint64_t target_id;
    uint64_t target_offset;
    size_t length;
    int advise_retry_cnt;
    int transport_hint;  // padding before 0.3.12.post1
    void group(uint64_t) {}
};
static_assert(sizeof(Request48) == 48, "TransferRequest up to 0.3.12.post1");

struct Request56 {
    int opcode;
    void *source;
    uint64_t target_id;
    uint64_t target_offset;
    size_t length;
    int advise_retry_cnt;
    int transport_hint;
    uint64_t task_group_id;
    void group(uint64_t id) { task_group_id = id; }
};
static_assert(sizeof(Request56) == 56 && offsetof(Request56, task_group_id) == 48, "TransferRequest from 0.3.13");

// sizeof(TransferEngine) is 56 in 0.3.13.post1; room for it to grow.
constexpr size_t kEngineBytes = 4096;
constexpr std::align_val_t kEngineAlign{64};

using String = std::string;

template <class NativeRequest>
class Wheel final : public Source {
  public:
    explicit Wheel(Lookup &find) {
#define CLASS "_ZN8mooncake14TransferEngine"
#define STRING "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
        find(construct_, CLASS "C1Eb");
        find(destruct_, CLASS "D1Ev");
        find(init_, CLASS "4initE" STRING "S8_S8_m");
        find(local_ip_and_port_, CLASS "17getLocalIpAndPortB5cxx11Ev");
        find(install_, CLASS "16installTransportE" STRING "PPv");
        find(uninstall_, CLASS "18uninstallTransportE" STRING);
        find(open_, CLASS "11openSegmentE" STRING);
        find(close_, CLASS "12closeSegmentEm");
        find(remove_local_, CLASS "18removeLocalSegmentE" STRING);
        find(enroll_, CLASS "19registerLocalMemoryEPvm" STRING "bb");
        find(withdraw_, CLASS "21unregisterLocalMemoryEPvb");
        find(enroll_batch_, CLASS "24registerLocalMemoryBatchERKSt6vectorINS_9Transport11BufferEntryESaIS3_EE" STRING);
        find(withdraw_batch_, CLASS "26unregisterLocalMemoryBatchERKSt6vectorIPvSaIS2_EE");
        find(allocate_, CLASS "15allocateBatchIDEm");
        find(submit_, CLASS "14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE");
        find(status_, CLASS "17getTransferStatusEmmRNS_9Transport14TransferStatusE");
        find(free_, CLASS "11freeBatchIDEm");
        find(sync_, CLASS "16syncSegmentCacheE" STRING);
#undef CLASS
#undef STRING
    }

    int create(const char *metadata, const char *name, const char *host, uint64_t port, bool discover, void **engine,
               Text &) override {
        Memory memory;
        construct_(memory.at, discover);
        Constructed constructed{memory.at, destruct_};
        int code = init_(memory.at, metadata, name, host, port);
        if (code) return code;
        constructed.at = nullptr;
        *engine = memory.release();
        return 0;
    }
    void destroy(void *engine) override {
        destruct_(engine);
        ::operator delete(engine, kEngineAlign);
    }
    int local_ip_and_port(void *engine, char *out, size_t capacity) override {
        Text(out, capacity).set(local_ip_and_port_(engine).c_str());
        return 0;
    }
    void *install(void *engine, const char *protocol, void **args) override { return install_(engine, protocol, args); }
    int uninstall(void *engine, const char *protocol) override { return uninstall_(engine, protocol); }
    int open(void *engine, const char *name, bool fresh, int32_t *segment, Text &text) override {
        if (fresh) {
            int code = sync_(engine, name);
            if (code) return code;
        }
        int64_t handle = static_cast<int64_t>(open_(engine, name));
        if (handle < 0) return handle < INT_MIN ? kNoCode : static_cast<int>(handle);
        if (handle > INT32_MAX) {
            text.set(("segment handle " + std::to_string(handle) + " does not fit 32 bits").c_str());
            return kNoCode;
        }
        *segment = static_cast<int32_t>(handle);
        return 0;
    }
    int close(void *engine, int32_t segment) override { return close_(engine, static_cast<uint64_t>(segment)); }
    int remove_local(void *engine, const char *name) override { return remove_local_(engine, name); }
    int enroll(void *engine, void *addr, size_t length, const char *location, bool remote) override {
        return enroll_(engine, addr, length, location, remote, true);
    }
    int withdraw(void *engine, void *addr) override { return withdraw_(engine, addr, true); }
    int enroll_batch(void *engine, const Buffer *buffers, size_t count, const char *location) override {
        return enroll_batch_(engine, std::vector<Buffer>(buffers, buffers + count), location);
    }
    int withdraw_batch(void *engine, void *const *addrs, size_t count) override {
        return withdraw_batch_(engine, std::vector<void *>(addrs, addrs + count));
    }
    uint64_t allocate(void *engine, size_t size) override { return allocate_(engine, size); }
    int submit(void *engine, uint64_t batch, const Request *requests, size_t count, uint64_t first_group,
               Text &text) override {
        // Kept per thread, so that a thread that submits again does not allocate. The engine is done with it on return.
        thread_local std::vector<NativeRequest> native;
        native.resize(count);
        for (size_t i = 0; i < count; i++) {
            const Request &request = requests[i];
            native[i] = NativeRequest{};
            native[i].opcode = request.opcode;
            native[i].source = request.source;
            native[i].target_id = static_cast<uint64_t>(static_cast<int64_t>(request.target_id));
            native[i].target_offset = request.target_offset;
            native[i].length = request.length;
            if (first_group) native[i].group(first_group + i);
        }
        return told(submit_(engine, batch, native), text);
    }
    int status(void *engine, uint64_t batch, size_t task, TaskStatus *status, Text &text) override {
        return told(status_(engine, batch, task, *status), text);
    }
    int free(void *engine, uint64_t batch, Text &text) override { return told(free_(engine, batch), text); }
    int sync(void *engine) override { return sync_(engine, String()); }

  private:
    // Frees what it holds unless released.
    struct Memory {
        void *at = std::memset(::operator new(kEngineBytes, kEngineAlign), 0, kEngineBytes);
        ~Memory() {
            if (at) ::operator delete(at, kEngineAlign);
        }
        void *release() {
            void *memory = at;
            at = nullptr;
            return memory;
        }
    };
    struct Constructed {
        void *at;
        void (*destruct)(void *);
        ~Constructed() {
            if (at) destruct(at);
        }
    };

    static int told(const NativeStatus &status, Text &text) {
        if (status.code) text.set(status.message);
        return status.code;
    }

    void (*construct_)(void *, bool);
    void (*destruct_)(void *);
    int (*init_)(void *, const String &, const String &, const String &, uint64_t);
    String (*local_ip_and_port_)(void *);
    void *(*install_)(void *, const String &, void **);
    int (*uninstall_)(void *, const String &);
    uint64_t (*open_)(void *, const String &);
    int (*close_)(void *, uint64_t);
    int (*remove_local_)(void *, const String &);
    int (*enroll_)(void *, void *, size_t, const String &, bool, bool);
    int (*withdraw_)(void *, void *, bool);
    int (*enroll_batch_)(void *, const std::vector<Buffer> &, const String &);
    int (*withdraw_batch_)(void *, const std::vector<void *> &);
    uint64_t (*allocate_)(void *, size_t);
    NativeStatus (*submit_)(void *, uint64_t, const std::vector<NativeRequest> &);
    NativeStatus (*status_)(void *, uint64_t, size_t, TaskStatus &);
    NativeStatus (*free_)(void *, uint64_t);
    int (*sync_)(void *, const String &);
};

template <class S>
int made(Lookup &find, Source **source, Text &text) {
    S *made = new S(find);
    if (find.missing().empty()) {
        *source = made;
        return 0;
    }
    delete made;
    text.set(find.missing().c_str());
    return kNoCode;
}

}  // namespace

// Each returns 0, Mooncake's code, kException or kNoCode; with any but 0, `text` says what there is to say.
extern "C" {

// `request_bytes`: 0 for the C interface, else the size of the wheel's TransferRequest. Missing names end up in `text`.
int moonring_source(void *handle, size_t request_bytes, Source **source, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) {
        Lookup find(handle);
        switch (request_bytes) {
            case 0: return made<CInterface>(find, source, t);
            case sizeof(Request48): return made<Wheel<Request48>>(find, source, t);
            case sizeof(Request56): return made<Wheel<Request56>>(find, source, t);
            default: t.set("no request of that size"); return kNoCode;
        }
    });
}

// Mooncake sets glog's level from MC_LOG_LEVEL when it first reads its settings: make it read them now, then set ours.
int moonring_log_level(void *handle, int level, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) {
        void *(*settings)();
        int *minimum;
        Lookup find(handle);
        find(settings, "_ZN8mooncake12globalConfigEv");
        find(minimum, "_ZN3fLI17FLAGS_minloglevelE");
        if (!find.missing().empty()) {
            t.set(("it does not export " + find.missing()).c_str());
            return kNoCode;
        }
        settings();
        *minimum = level;
        return 0;
    });
}

int moonring_create(Source *s, const char *metadata, const char *name, const char *host, uint64_t port, bool discover,
                    void **engine, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) { return s->create(metadata, name, host, port, discover, engine, t); });
}
int moonring_destroy(Source *s, void *engine, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) {
        s->destroy(engine);
        return 0;
    });
}
int moonring_local_ip_and_port(Source *s, void *engine, char *out, size_t out_capacity, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->local_ip_and_port(engine, out, out_capacity); });
}
int moonring_install(Source *s, void *engine, const char *protocol, void **args, void **transport, char *text,
                     size_t capacity) {
    return guarded(text, capacity, [&](Text &) {
        *transport = s->install(engine, protocol, args);
        return *transport ? 0 : kNoCode;
    });
}
int moonring_uninstall(Source *s, void *engine, const char *protocol, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->uninstall(engine, protocol); });
}
int moonring_open(Source *s, void *engine, const char *name, bool fresh, int32_t *segment, char *text,
                  size_t capacity) {
    return guarded(text, capacity, [&](Text &t) { return s->open(engine, name, fresh, segment, t); });
}
int moonring_close(Source *s, void *engine, int32_t segment, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->close(engine, segment); });
}
int moonring_remove_local(Source *s, void *engine, const char *name, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->remove_local(engine, name); });
}
int moonring_register(Source *s, void *engine, void *addr, size_t length, const char *location, bool remote, char *text,
                      size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->enroll(engine, addr, length, location, remote); });
}
int moonring_unregister(Source *s, void *engine, void *addr, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->withdraw(engine, addr); });
}
int moonring_register_batch(Source *s, void *engine, const Buffer *buffers, size_t count, const char *location,
                            char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->enroll_batch(engine, buffers, count, location); });
}
int moonring_unregister_batch(Source *s, void *engine, void *const *addrs, size_t count, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->withdraw_batch(engine, addrs, count); });
}
int moonring_allocate(Source *s, void *engine, size_t size, uint64_t *batch, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) {
        // Batches are pointers. Mooncake answers a failure with a small negative number in their place.
        int64_t id = static_cast<int64_t>(s->allocate(engine, size));
        if (id == 0) return kNoCode;
        if (id < 0 && id > -4096) return static_cast<int>(id);
        *batch = static_cast<uint64_t>(id);
        return 0;
    });
}
int moonring_submit(Source *s, void *engine, uint64_t batch, const Request *requests, size_t count,
                    uint64_t first_group, char *text, size_t capacity) {
    return guarded(text, capacity,
                   [&](Text &t) { return s->submit(engine, batch, requests, count, first_group, t); });
}
int moonring_status(Source *s, void *engine, uint64_t batch, size_t task, TaskStatus *status, char *text,
                    size_t capacity) {
    return guarded(text, capacity, [&](Text &t) { return s->status(engine, batch, task, status, t); });
}
int moonring_free(Source *s, void *engine, uint64_t batch, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &t) { return s->free(engine, batch, t); });
}
int moonring_sync(Source *s, void *engine, char *text, size_t capacity) {
    return guarded(text, capacity, [&](Text &) { return s->sync(engine); });
}
}
