/* NCCL's collectives as a program calls them: all but two tensors and a stream is laid out when the program is made.

   The communicator is one of torch's, whose process group made it and ends it.  NCCL itself is the library that torch
   has loaded; its functions are looked up by name.  NCCL may wait for other ranks in a call: the interpreter's lock is
   not held meanwhile, so that the watchdog goes on, and a lock of our own keeps threads apart.

   torch's watchdog does not see these calls.  What it would do for them is done here: each communicator counts what it
   was given, and two events, behind the oldest unfinished collective and behind the newest, tell since when the GPU has been
   in one that they are behind. */

#include "driver.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, KINDS };
enum { NO_TIMING = 2, RELAXED = 2, NOT_READY = 600, IN_PROGRESS = 7 };

static struct {
    int (*ncclAllReduce)(const void *, void *, size_t, int, int, void *, void *);
    int (*ncclAllGather)(const void *, void *, size_t, int, void *, void *);
    int (*ncclReduceScatter)(const void *, void *, size_t, int, int, void *, void *);
    int (*ncclGroupStart)(void);
    int (*ncclGroupEnd)(void);
    int (*ncclCommGetAsyncError)(void *, int *);
    const char *(*ncclGetLastError)(void *);
    const char *(*ncclGetErrorString)(int);
} nccl;

static struct {
    int (*cuEventCreate)(void **, unsigned);
    int (*cuEventRecord)(void *, void *);
    int (*cuEventQuery)(void *);
    int (*cuStreamIsCapturing)(void *, int *);
    int (*cuThreadExchangeStreamCaptureMode)(int *);
} events;

/* An event behind a collective. */
typedef struct {
    void *event;
    volatile double since; /* when that was issued; 0 where there is none */
} Mark;

/* What is known of a communicator; never freed, as there are few and programs point to them. */
typedef struct Known {
    void *communicator;
    unsigned long long issued;
    Mark marks[2];            /* the older one stays until it has ended, the other one is behind the newest collective */
    volatile int newest;      /* which mark that is */
    volatile double entering; /* since when a thread has been in NCCL's function; 0 where none is */
    struct Known *next;
} Known;

/* ``pieces`` collectives of equal size in one group, each so many bytes behind the one before: what lies along an inner
   dim is sent from where it lies. */
typedef struct {
    int kind, type, operation;
    size_t count; /* elements of a piece, as NCCL has it of this kind */
    Py_ssize_t pieces, given_step, taken_step;
    Known *known;
} Collective;

/* Collectives of one communicator in one group. */
typedef struct {
    Py_ssize_t count;
    const Collective **collectives;
    PyObject *functions; /* a tuple, which keeps them */
} Group;

static Known *all;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static PyObject *data_ptr;
static const char COLLECTIVE[] = "collective", GROUP[] = "group";

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static PyObject *connect_nccl(PyObject *module, PyObject *arguments) {
    const char *name, *driver;
    if (!PyArg_ParseTuple(arguments, "ss", &name, &driver)) return NULL;
    /* a second copy of the library would not know the communicators of the first */
    void *handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD), *cuda = dlopen(driver, RTLD_NOW);
    if (!handle) return PyErr_Format(PyExc_OSError, "%s is not loaded", name);
    if (!cuda) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define TAKE(library, table, function)                                                                       \
    if (!(*(void **)&table.function = dlsym(library, #function)))                                            \
        return PyErr_Format(PyExc_OSError, "no " #function " is in %s", name);
    TAKE(handle, nccl, ncclAllReduce) TAKE(handle, nccl, ncclAllGather) TAKE(handle, nccl, ncclReduceScatter)
    TAKE(handle, nccl, ncclGroupStart) TAKE(handle, nccl, ncclGroupEnd)
    TAKE(handle, nccl, ncclCommGetAsyncError) TAKE(handle, nccl, ncclGetLastError) TAKE(handle, nccl, ncclGetErrorString)
    TAKE(cuda, events, cuEventCreate) TAKE(cuda, events, cuEventRecord) TAKE(cuda, events, cuEventQuery)
    TAKE(cuda, events, cuStreamIsCapturing) TAKE(cuda, events, cuThreadExchangeStreamCaptureMode)
#undef TAKE
    if (!data_ptr && !(data_ptr = PyUnicode_InternFromString("data_ptr"))) return NULL;
    Py_RETURN_NONE;
}

static Known *known_of(void *communicator) {
    for (Known *k = all; k; k = k->next)
        if (k->communicator == communicator) return k;
    Known *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    *made = (Known){.communicator = communicator, .next = all};
    return all = made;
}

static int issue_one(const Collective *c, void *given, void *taken, void *stream) {
    void *communicator = c->known->communicator;
    switch (c->kind) {
    case ALL_REDUCE:
        return nccl.ncclAllReduce(given, taken, c->count, c->type, c->operation, communicator, stream);
    case ALL_GATHER:
        return nccl.ncclAllGather(given, taken, c->count, c->type, communicator, stream);
    default:
        return nccl.ncclReduceScatter(given, taken, c->count, c->type, c->operation, communicator, stream);
    }
}

/* All of them: NCCL makes one launch of a group.  One alone needs none. */
static int issue(const Collective *const *all_of, Py_ssize_t count, void *const *addresses, void *stream) {
    if (count == 1 && all_of[0]->pieces == 1) return issue_one(all_of[0], addresses[0], addresses[1], stream);
    int status = nccl.ncclGroupStart(), ended;
    if (status) return status;
    for (Py_ssize_t k = 0; k < count && !status; k++) {
        const Collective *c = all_of[k];
        char *given = addresses[2 * k], *taken = addresses[2 * k + 1];
        for (Py_ssize_t n = 0; n < c->pieces && !status; n++, given += c->given_step, taken += c->taken_step)
            status = issue_one(c, given, taken, stream);
        if (status == IN_PROGRESS) status = 0; /* of a group, its end tells */
    }
    ended = nccl.ncclGroupEnd();
    return status ? status : ended;
}

/* A communicator that does not block takes nothing else until it has done what it was given. */
static int settled(int status, void *communicator) {
    struct timespec pause = {.tv_nsec = 10000};
    while (status == IN_PROGRESS) {
        nanosleep(&pause, NULL);
        int asked = nccl.ncclCommGetAsyncError(communicator, &status);
        if (asked) return asked;
    }
    return status;
}

static int has_ended(const Mark *m) { return !m->since || events.cuEventQuery(m->event) != NOT_READY; }

/* Have an event stand behind the collective that was issued, and one behind the oldest that has not ended.  In a graph
   that is being captured nothing runs.  What another thread reads meanwhile is too young, never too old: an event that is
   recorded anew has its new time before. */
static void mark(Known *k, void *stream) {
    int capturing = 0;
    k->issued++;
    if (events.cuStreamIsCapturing(stream, &capturing) || capturing) return;
    int other = !k->newest;
    if (has_ended(&k->marks[other])) k->newest = other; /* what was the newest is the oldest from here on */
    Mark *m = &k->marks[k->newest];
    if (!m->event && events.cuEventCreate(&m->event, NO_TIMING)) m->event = NULL;
    if (!m->event) return;
    m->since = now();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (events.cuEventRecord(m->event, stream)) m->since = 0;
}

static void *address(PyObject *tensor) {
    if (PyLong_CheckExact(tensor)) return PyLong_AsVoidPtr(tensor);
    PyObject *found = PyObject_CallMethodNoArgs(tensor, data_ptr);
    void *pointer = found ? PyLong_AsVoidPtr(found) : NULL;
    Py_XDECREF(found);
    return pointer;
}

static PyObject *run(const Collective *const *all_of, Py_ssize_t collectives, PyObject *const *given, Py_ssize_t count) {
    if (count != 1 + 2 * collectives)
        return PyErr_Format(PyExc_TypeError, "a collective takes %zd arguments, not %zd", 1 + 2 * collectives, count);
    void *stream = PyLong_AsVoidPtr(given[0]), *addresses[2 * collectives];
    for (Py_ssize_t k = 0; k < 2 * collectives && !PyErr_Occurred(); k++) addresses[k] = address(given[1 + k]);
    if (PyErr_Occurred()) return NULL;
    Known *known = all_of[0]->known;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    pthread_mutex_lock(&one_at_a_time);
    known->entering = now();
    status = settled(issue(all_of, collectives, addresses, stream), known->communicator);
    known->entering = 0;
    mark(known, stream);
    pthread_mutex_unlock(&one_at_a_time);
    Py_END_ALLOW_THREADS;
    if (status)
        return PyErr_Format(PyExc_RuntimeError, "%s: %s", nccl.ncclGetErrorString(status),
                            nccl.ncclGetLastError(known->communicator));
    Py_RETURN_NONE;
}

static PyObject *call(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    const Collective *c = PyCapsule_GetPointer(self, COLLECTIVE);
    return c ? run(&c, 1, given, count) : NULL;
}

static PyObject *call_group(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    const Group *g = PyCapsule_GetPointer(self, GROUP);
    return g ? run(g->collectives, g->count, given, count) : NULL;
}

static void release(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, COLLECTIVE)); }

static PyMethodDef call_method = {"collective", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL};

static PyMethodDef group_method = {"group", (PyCFunction)(void (*)(void))call_group, METH_FASTCALL, NULL};

static PyObject *collective(PyObject *module, PyObject *arguments) {
    unsigned long long communicator;
    Py_ssize_t count;
    Collective made = {.pieces = 1};
    if (!PyArg_ParseTuple(arguments, "iKnii|nnn", &made.kind, &communicator, &count, &made.type, &made.operation,
                          &made.pieces, &made.given_step, &made.taken_step))
        return NULL;
    if (made.kind < 0 || made.kind >= KINDS || count < 1 || made.pieces < 1)
        return PyErr_Format(PyExc_ValueError, "no collective %d of %zd elements", made.kind, count);
    made.count = (size_t)count;
    made.known = known_of((void *)(uintptr_t)communicator);
    Collective *kept = malloc(sizeof *kept);
    PyObject *capsule = kept && made.known ? PyCapsule_New(kept, COLLECTIVE, release) : NULL;
    if (!capsule) {
        free(kept);
        return PyErr_NoMemory();
    }
    *kept = made;
    PyObject *function = PyCFunction_New(&call_method, capsule);
    Py_DECREF(capsule);
    return function;
}

static void release_group(PyObject *capsule) {
    Group *g = PyCapsule_GetPointer(capsule, GROUP);
    Py_XDECREF(g->functions);
    free(g->collectives);
    free(g);
}

static PyObject *group(PyObject *module, PyObject *functions) {
    if (!PyTuple_Check(functions) || !PyTuple_GET_SIZE(functions))
        return PyErr_Format(PyExc_TypeError, "a tuple of collectives");
    Group *g = calloc(1, sizeof *g);
    PyObject *capsule = g ? PyCapsule_New(g, GROUP, release_group) : NULL;
    if (!capsule) {
        free(g);
        return PyErr_NoMemory();
    }
    g->functions = Py_NewRef(functions);
    g->count = PyTuple_GET_SIZE(functions);
    g->collectives = calloc((size_t)g->count, sizeof *g->collectives);
    for (Py_ssize_t k = 0; g->collectives && k < g->count; k++) {
        PyObject *function = PyTuple_GET_ITEM(functions, k);
        PyObject *self = PyCFunction_Check(function) ? PyCFunction_GetSelf(function) : NULL;
        const Collective *c = self && PyCapsule_IsValid(self, COLLECTIVE) ? PyCapsule_GetPointer(self, COLLECTIVE) : NULL;
        if (!c || (k && c->known != g->collectives[0]->known)) {
            Py_DECREF(capsule);
            return PyErr_Format(PyExc_TypeError, "%R is no collective of this communicator", function);
        }
        g->collectives[k] = c;
    }
    PyObject *made = g->collectives ? PyCFunction_New(&group_method, capsule) : PyErr_NoMemory();
    Py_DECREF(capsule);
    return made;
}

/* A communicator that was not used before may be where one was that is gone. */
static PyObject *begin_counting(PyObject *module, PyObject *communicator) {
    void *wanted = PyLong_AsVoidPtr(communicator);
    if (PyErr_Occurred()) return NULL;
    Known *k = known_of(wanted);
    if (!k) return PyErr_NoMemory();
    k->marks[0].since = k->marks[1].since = 0;
    k->issued = 0;
    Py_RETURN_NONE;
}

static PyObject *issued(PyObject *module, PyObject *communicator) {
    void *wanted = PyLong_AsVoidPtr(communicator);
    if (PyErr_Occurred()) return NULL;
    for (Known *k = all; k; k = k->next)
        if (k->communicator == wanted) return PyLong_FromUnsignedLongLong(k->issued);
    return PyLong_FromLong(0);
}

/* For how many seconds a collective has been waiting: the oldest that is marked and has not ended.  Another thread asks, which takes no lock, and
   does not disturb a graph that is being captured. */
static PyObject *waiting(PyObject *module, PyObject *nothing) {
    double longest = 0;
    int mode = RELAXED;
    if (all) events.cuThreadExchangeStreamCaptureMode(&mode);
    for (Known *k = all; k; k = k->next) {
        double entered = k->entering;
        if (entered && now() - entered > longest) longest = now() - entered;
        for (const Mark *m = k->marks; m < k->marks + 2; m++) {
            double since = m->since;
            if (!since || now() - since <= longest || has_ended(m)) continue;
            if (m->since == since) longest = now() - since; /* else it has been recorded anew */
        }
    }
    if (all) events.cuThreadExchangeStreamCaptureMode(&mode);
    return PyFloat_FromDouble(longest);
}

PyMethodDef nccl_methods[] = {
    {"connect_nccl", connect_nccl, METH_VARARGS, NULL},
    {"collective", collective, METH_VARARGS, NULL},
    {"group", group, METH_O, NULL},
    {"begin_counting", begin_counting, METH_O, NULL},
    {"issued", issued, METH_O, NULL},
    {"waiting", waiting, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
