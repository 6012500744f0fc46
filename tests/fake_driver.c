/* A CUDA driver that runs nothing and remembers what it was asked for: tests read and set these variables. */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* What streams were given, in order: a line for each. */
char noted[1 << 16];
static unsigned noted_length;
void forget(void) { noted[noted_length = 0] = 0; }
static void line(const char *format, ...) {
    va_list values;
    va_start(values, format);
    if (noted_length + 100 < sizeof noted) noted_length += (unsigned)vsnprintf(noted + noted_length, 100, format, values);
    va_end(values);
}

typedef struct {
    unsigned grid[3], block[3], shared;
    uint64_t stream;
    const int *attributes;
    unsigned count;
} Config;

unsigned last_grid, last_threads, last_shared, last_attributes, launches, entered;
int last_attribute, last_value, refusals, status, max_threads = 1024, dynamic_shared;
uint64_t last_stream, last_function, last_slots[16], wanted_slots;
char loaded[64];
uint64_t context = 1;

typedef struct { void *function; unsigned grid[3], block[3], shared; void **slots, **extra, *kernel, *context; } Node;
int capturing, captures[64]; /* any stream; and by handles of streams, the number of the capture */
int asked_status, graph_status, set_status, graphs, graph_launches, sets, nodes, chained, destroyed;
uint64_t graph_slots[8][8], wanted_of_node[8], graph_functions[8];
static void note(uint64_t node, const Node *given) {
    graph_functions[node - 1] = (uint64_t)given->function;
    for (unsigned k = 0; k < wanted_of_node[node - 1]; k++) memcpy(&graph_slots[node - 1][k], given->slots[k], 8);
    last_grid = given->grid[0] * given->grid[1] * given->grid[2];
    last_threads = given->block[0] * given->block[1] * given->block[2];
    last_shared = given->shared;
}

void leave(void) { context = 0; }

int cuGetErrorString(int code, const char **text) {
    *text = code == 720 ? "too many blocks in cooperative launch" : "it is refused";
    return 0;
}
int cuCtxGetCurrent(uint64_t *found) { *found = context; return 0; }
int cuCtxSetCurrent(uint64_t given) { context = given; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t *found, int device) { *found = 100 + (unsigned)device; entered++; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 97 ? 232448 : attribute == 16 ? 132 : 0;
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *each, void *function, int threads, uint64_t shared) {
    *each = 228 * 1024 / (int)shared;
    return threads > 1024 ? 701 : 0;
}
int cuModuleLoadData(void **module, const void *image) { strncpy(loaded, image, sizeof loaded - 1); *module = (void *)7; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)4096;
    return strcmp(name, "kernel") ? 500 : 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 1024 : max_threads; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { dynamic_shared = attribute == 8 ? value : 0; return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return config != 1; }
int cuLaunchKernelEx(const Config *config, void *function, void **slots, void **extra) {
    if (!context) return 201;
    line("%s %d of %u\n", status ? "refuse" : "launch", (int)config->stream, config->grid[0]);
    if (status) return status;
    launches++;
    last_grid = config->grid[0] * config->grid[1] * config->grid[2];
    last_threads = config->block[0] * config->block[1] * config->block[2];
    last_shared = config->shared;
    last_stream = config->stream;
    last_attributes = config->count;
    last_attribute = config->count ? config->attributes[0] : 0;
    last_value = config->count ? config->attributes[2] : 0;
    last_function = (uint64_t)function;
    for (unsigned k = 0; k < wanted_slots; k++) memcpy(&last_slots[k], slots[k], 8);
    return extra != 0;
}
static int capture_of(uint64_t stream) { return stream < 64 ? captures[stream] : 0; }
/* Of the default stream, it is an error to ask while a stream that waits for that one is captured. */
int cuStreamIsCapturing(uint64_t stream, int *found) {
    *found = capturing || capture_of(stream);
    for (unsigned k = 0; k < 64 && !stream; k++)
        if (captures[k]) return 906;
    return context ? asked_status : 201;
}
/* Of a stream that is captured, the last node of the graph is 5. */
int cuStreamGetCaptureInfo_v2(uint64_t stream, int *found, uint64_t *number, uint64_t *graph, uint64_t **last, uint64_t *count) {
    static uint64_t node = 5;
    *found = capture_of(stream) != 0;
    if (number) *number = (uint64_t)capture_of(stream);
    if (graph) *graph = 11;
    if (last) *last = &node;
    if (count) *count = 1;
    return context ? 0 : 201;
}
int cuGraphAddEventRecordNode(uint64_t *node, void *graph, uint64_t *behind, uint64_t count, uint64_t event) {
    *node = 40;
    line("node of event %d\n", (int)event);
    return 0;
}
int cuGraphAddDependencies(void *graph, uint64_t *from, uint64_t *to, uint64_t count) {
    line("node %d behind\n", (int)*to);
    return 0;
}
int cuGraphCreate(uint64_t *graph, unsigned flags) { nodes = 0; chained = 1; graphs++; *graph = 11; return flags; }
int cuGraphDestroy(void *graph) { destroyed++; return 0; }
int cuGraphExecDestroy(void *executable) { destroyed++; return 0; }
int cuGraphAddKernelNode_v2(uint64_t *node, void *graph, uint64_t *before, uint64_t count, const Node *given) {
    chained = chained && count == (nodes > 0) && (!count || *before == (uint64_t)nodes);
    *node = (uint64_t)++nodes;
    note(*node, given);
    return 0;
}
int cuGraphInstantiateWithFlags(uint64_t *executable, void *graph, uint64_t flags) { *executable = 13; return graph_status; }
int cuGraphExecKernelNodeSetParams_v2(void *executable, void *node, const Node *given) {
    sets++;
    note((uint64_t)node, given);
    return set_status;
}
int cuGraphLaunch(void *executable, uint64_t stream) { graph_launches++; last_stream = stream; return status; }

/* NCCL, and the events by which waiting for it is seen. */
int exchanged_mode, nccl_kind = -1, nccl_type, nccl_operation, nccl_status, recorded, event_status, nccl_calls, ended;
int record_status, wait_status, in_progress;
int made_events; static int behind[64]; /* of each event, the collective that it was recorded behind */
uint64_t nccl_addresses[16][2], nccl_count, nccl_given, nccl_taken, nccl_communicator, nccl_stream;
static int nccl_called(int kind, uint64_t given, uint64_t taken, uint64_t count, int type, int operation, uint64_t c, uint64_t stream) {
    nccl_kind = kind; nccl_given = given; nccl_taken = taken; nccl_count = count; nccl_type = type;
    nccl_operation = operation; nccl_communicator = c; nccl_stream = stream;
    nccl_addresses[nccl_calls % 16][0] = given; nccl_addresses[nccl_calls % 16][1] = taken;
    nccl_calls++;
    return in_progress ? 7 : nccl_status;
}
int ncclAllReduce(uint64_t a, uint64_t b, uint64_t n, int t, int o, uint64_t c, uint64_t s) { return nccl_called(0, a, b, n, t, o, c, s); }
int ncclAllGather(uint64_t a, uint64_t b, uint64_t n, int t, uint64_t c, uint64_t s) { return nccl_called(1, a, b, n, t, 0, c, s); }
int ncclReduceScatter(uint64_t a, uint64_t b, uint64_t n, int t, int o, uint64_t c, uint64_t s) { return nccl_called(2, a, b, n, t, o, c, s); }
/* Of a group, what the last one was handed; and of each, from which address to which. */
int group_starts, group_ends, group_status;
int ncclGroupStart(void) { group_starts++; return 0; }
int ncclGroupEnd(void) { group_ends++; return group_status; }
const char *ncclGetLastError(void *c) { return "the peer is gone"; }
const char *ncclGetErrorString(int status) { return "unhandled error"; }
int ncclCommGetAsyncError(uint64_t c, int *found) { *found = --in_progress > 0 ? 7 : nccl_status; return 0; }
int cuEventCreate(uint64_t *event, unsigned flags) { *event = 1 + made_events++ % 63; return flags != 2 && flags != 0; }
int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags) {
    line("wait %d%s\n", (int)stream, flags ? " in each launch" : "");
    return context ? wait_status : 201;
}
int cuEventRecord(uint64_t event, uint64_t stream) {
    recorded++;
    line("record %d%s\n", (int)stream, exchanged_mode == 2 ? "" : " in a mode of captures");
    if (!context) return 201;
    if (!record_status) behind[event] = nccl_calls;
    return record_status;
}
/* With an event_status, collectives end in order, and so many have. */
int cuEventQuery(uint64_t event) { return behind[event] <= ended ? 0 : event_status; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int before = exchanged_mode; exchanged_mode = *mode; *mode = before; return 0; }
int cuEventSynchronize(uint64_t event) { return event_status; }
int cuEventElapsedTime(float *found, uint64_t start, uint64_t end) { *found = 1.5f; return 0; }
