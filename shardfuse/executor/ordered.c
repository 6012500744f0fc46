/* Launches of a kernel that waits for other GPUs: each behind the last one, as mesh/launch_order.py has it.

   A call that finds everything as it was before is made here, by one function and at most five calls of the driver.
   What is rare goes to ``otherwise``, which is written in Python and does the whole of it: a kernel's report, other
   process groups than before, Triton's own entry, captures, and the first launch that needs an event.  Both read and
   write the same memory, which is Python's.

   One thread at a time launches (turns.py), so that the order needs no lock while the interpreter's is not held. */

#include "driver.h"
#include <dlfcn.h>
#include <stdlib.h>

enum { RELAXED = 2 };            /* CU_STREAM_CAPTURE_MODE_RELAXED */
enum { OTHERWISE = -1, DONE = 0 }; /* beside errors of the driver, which are positive */

static struct {
    int (*cuStreamIsCapturing)(void *, int *);
    int (*cuStreamWaitEvent)(void *, void *, unsigned);
    int (*cuEventRecord)(void *, void *);
    int (*cuThreadExchangeStreamCaptureMode)(int *);
} cuda;

/* ``LaunchState`` of mesh/launch_order.py. */
typedef struct { int64_t event, last, is_captured; } State;

typedef struct {
    Py_buffer state, count, report; /* a State, and two words: launches so far, and what a kernel has reported */
    int device;
    PyObject *table;     /* the first argument of each launch */
    PyObject *room;      /* whose ``left()`` is asked in each call */
    PyObject *launches;  /* a dict: what is launched, by what that gives */
    PyObject *otherwise;
} Ordered;

static PyObject *left;
static const char ORDERED[] = "ordered";

const char *connect_ordered(void *library) {
#define TAKE(function)                                                                                       \
    if (!(*(void **)&cuda.function = dlsym(library, #function))) return #function;
    TAKE(cuStreamIsCapturing) TAKE(cuStreamWaitEvent) TAKE(cuEventRecord) TAKE(cuThreadExchangeStreamCaptureMode)
#undef TAKE
    return NULL;
}

/* Which call of the driver was refused, for the words of the exception; NULL where that was the launch. */
typedef struct { int status; const char *call; } Outcome;

/* Another thread may be capturing, in whatever mode: what is recorded here is no part of that. */
static int record(void *event, void *stream) {
    int mode = RELAXED, status = cuda.cuThreadExchangeStreamCaptureMode(&mode), recorded;
    if (status) return status;
    recorded = cuda.cuEventRecord(event, stream);
    status = cuda.cuThreadExchangeStreamCaptureMode(&mode);
    return recorded ? recorded : status;
}

/* ``follow``, the launches and ``ended``.  What comes next follows also what was launched before one was refused. */
static Outcome run(const Ordered *o, void *stream, const Launch *const *launches, Py_ssize_t count, uint64_t *values) {
    State *state = o->state.buf;
    void *event = (void *)(intptr_t)state->event;
    int status = enter_device(o->device), capturing = 0;
    if (status) return (Outcome){status, "cuCtxSetCurrent"};
    if (stream) { /* the default stream is never captured, and needs no event as long as there is none */
        status = cuda.cuStreamIsCapturing(stream, &capturing);
        if (status || capturing || !event) return (Outcome){OTHERWISE, NULL};
    }
    ++*(int64_t *)o->count.buf;
    if (event && (state->is_captured || state->last != (int64_t)(intptr_t)stream)) {
        status = cuda.cuStreamWaitEvent(stream, event, 0);
        if (status) return (Outcome){status, "cuStreamWaitEvent"};
    }
    state->last = (int64_t)(intptr_t)stream;
    for (Py_ssize_t k = 0; k < count && !status; values += slots_of(launches[k++]))
        status = start_launch(launches[k], stream, values);
    int recorded = event ? record(event, stream) : 0;
    return status || !recorded ? (Outcome){status, NULL} : (Outcome){recorded, "cuEventRecord"};
}

/* What is launched with as much room as there is now, a new reference; NULL for nothing yet, or with an error. */
static PyObject *launches_now(const Ordered *o) {
    PyObject *now = PyObject_CallMethodNoArgs(o->room, left);
    PyObject *found = now ? PyDict_GetItemWithError(o->launches, now) : NULL;
    Py_XDECREF(now);
    return Py_XNewRef(found);
}

/* OTHERWISE, or DONE with the exception that is to be raised, if any. */
static int launch_all(const Ordered *o, PyObject *functions, PyObject *const *given, Py_ssize_t count) {
    Py_ssize_t many = PyTuple_Check(functions) ? PyTuple_GET_SIZE(functions) : 0, slots = 0;
    if (!many) return PyErr_Format(PyExc_TypeError, "%R is no tuple of launches", functions), DONE;
    const Launch *launches[many];
    for (Py_ssize_t k = 0; k < many; slots += slots_of(launches[k++])) {
        if (!(launches[k] = launch_of(PyTuple_GET_ITEM(functions, k)))) return DONE;
        if (arguments_of(launches[k]) != count) return wrong_count(arguments_of(launches[k]), count), DONE;
    }
    uint64_t values[slots];
    PyObject *arguments[count];
    arguments[0] = o->table;
    for (Py_ssize_t k = 1; k < count; k++) arguments[k] = given[k];
    for (Py_ssize_t k = 0, at = 0; k < many; at += slots_of(launches[k++])) {
        int filled = fill_launch(launches[k], arguments, values + at);
        if (filled <= 0) return filled ? DONE : OTHERWISE;
    }
    void *stream = PyLong_AsVoidPtr(given[0]);
    if (PyErr_Occurred()) return DONE;
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = run(o, stream, launches, many, values);
    Py_END_ALLOW_THREADS;
    if (outcome.status == OTHERWISE) return OTHERWISE;
    if (outcome.call) {
        PyErr_Format(PyExc_RuntimeError, "%s: %s", outcome.call, message_of(outcome.status));
    } else if (outcome.status) {
        Py_XDECREF(raise_refused(launches[0], outcome.status));
    }
    return DONE;
}

static PyObject *launch_ordered(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    const Ordered *o = PyCapsule_GetPointer(self, ORDERED);
    if (!o) return NULL;
    if (!count) return PyErr_Format(PyExc_TypeError, "a launch takes a stream");
    PyObject *functions = NULL;
    if (!*(volatile int64_t *)o->report.buf && given[0] != Py_None) functions = launches_now(o);
    if (PyErr_Occurred()) return NULL;
    int done = functions ? launch_all(o, functions, given, count) : OTHERWISE;
    Py_XDECREF(functions);
    if (done == OTHERWISE) return PyObject_Vectorcall(o->otherwise, given, (size_t)count, NULL);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static void release(PyObject *capsule) {
    Ordered *o = PyCapsule_GetPointer(capsule, ORDERED);
    PyBuffer_Release(&o->state);
    PyBuffer_Release(&o->count);
    PyBuffer_Release(&o->report);
    Py_XDECREF(o->table);
    Py_XDECREF(o->room);
    Py_XDECREF(o->launches);
    Py_XDECREF(o->otherwise);
    free(o);
}

static PyMethodDef ordered_method = {"ordered", (PyCFunction)(void (*)(void))launch_ordered, METH_FASTCALL, NULL};

static PyObject *ordered(PyObject *module, PyObject *arguments) {
    if (!left && !(left = PyUnicode_InternFromString("left"))) return NULL;
    Ordered *o = calloc(1, sizeof *o);
    PyObject *capsule = o ? PyCapsule_New(o, ORDERED, release) : NULL;
    if (!capsule) {
        free(o);
        return PyErr_NoMemory();
    }
    PyObject *table, *room, *launches, *otherwise, *made = NULL;
    if (PyArg_ParseTuple(arguments, "w*w*w*iO!OO!O", &o->state, &o->count, &o->report, &o->device, &PyLong_Type, &table,
                         &room, &PyDict_Type, &launches, &otherwise)) {
        o->table = Py_NewRef(table);
        o->room = Py_NewRef(room);
        o->launches = Py_NewRef(launches);
        o->otherwise = Py_NewRef(otherwise);
        if (o->state.len == sizeof(State) && o->count.len == sizeof(int64_t) && o->report.len == sizeof(int64_t))
            made = PyCFunction_New(&ordered_method, capsule);
        else
            PyErr_Format(PyExc_ValueError, "a state of %zu bytes, and two words", sizeof(State));
    }
    Py_DECREF(capsule);
    return made;
}

PyMethodDef ordered_methods[] = {
    {"ordered", ordered, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
