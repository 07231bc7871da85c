/*
 * Every driver function that is interposed, once. Each has a shim of the same name, an export, a place in `pm_real`,
 * and is found by link, by dlsym and by cuGetProcAddress.
 */
#ifndef PM_HOOKS_H
#define PM_HOOKS_H

#define PM_HOOKS(X)                                                                                                    \
    /* finding functions, starting */                                                                                  \
    X(cuGetProcAddress)                                                                                                \
    X(cuGetProcAddress_v2)                                                                                             \
    X(cuInit)                                                                                                          \
    /* contexts */                                                                                                     \
    X(cuCtxCreate)                                                                                                     \
    X(cuCtxCreate_v2)                                                                                                  \
    X(cuCtxCreate_v3)                                                                                                  \
    X(cuCtxCreate_v4)                                                                                                  \
    X(cuCtxDestroy)                                                                                                    \
    X(cuCtxDestroy_v2)                                                                                                 \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxRelease)                                                                                       \
    X(cuDevicePrimaryCtxRelease_v2)                                                                                    \
    X(cuDevicePrimaryCtxReset)                                                                                         \
    X(cuDevicePrimaryCtxReset_v2)                                                                                      \
    /* launches */                                                                                                     \
    X(cuLaunchKernel)                                                                                                  \
    X(cuLaunchKernel_ptsz)                                                                                             \
    X(cuLaunchKernelEx)                                                                                                \
    X(cuLaunchKernelEx_ptsz)                                                                                           \
    X(cuLaunchCooperativeKernel)                                                                                       \
    X(cuLaunchCooperativeKernel_ptsz)                                                                                  \
    X(cuLaunchCooperativeKernelMultiDevice)                                                                            \
    X(cuLaunch)                                                                                                        \
    X(cuLaunchGrid)                                                                                                    \
    X(cuLaunchGridAsync)                                                                                               \
    X(cuGraphLaunch)                                                                                                   \
    X(cuGraphLaunch_ptsz)                                                                                              \
    X(cuGraphExecDestroy)                                                                                              \
    X(cuGraphExecUpdate)                                                                                               \
    X(cuGraphExecUpdate_v2)                                                                                            \
    X(cuGraphExecKernelNodeSetParams)                                                                                  \
    X(cuGraphExecKernelNodeSetParams_v2)                                                                               \
    X(cuGraphExecNodeSetParams)                                                                                        \
    X(cuGraphExecChildGraphNodeSetParams)                                                                              \
    X(cuGraphNodeSetEnabled)                                                                                           \
    /* captures */                                                                                                     \
    X(cuStreamBeginCapture)                                                                                            \
    X(cuStreamBeginCapture_ptsz)                                                                                       \
    X(cuStreamBeginCapture_v2)                                                                                         \
    X(cuStreamBeginCapture_v2_ptsz)                                                                                    \
    X(cuStreamBeginCaptureToGraph)                                                                                     \
    X(cuStreamBeginCaptureToGraph_ptsz)                                                                                \
    X(cuStreamEndCapture)                                                                                              \
    X(cuStreamEndCapture_ptsz)                                                                                         \
    /* waiting, and what else goes into a stream */                                                                    \
    X(cuStreamSynchronize)                                                                                             \
    X(cuStreamSynchronize_ptsz)                                                                                        \
    X(cuCtxSynchronize)                                                                                                \
    X(cuCtxSynchronize_v2)                                                                                             \
    X(cuEventSynchronize)                                                                                              \
    X(cuStreamDestroy)                                                                                                 \
    X(cuStreamDestroy_v2)                                                                                              \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuStreamWaitEvent_ptsz)                                                                                          \
    X(cuStreamWaitValue32)                                                                                             \
    X(cuStreamWaitValue32_ptsz)                                                                                        \
    X(cuStreamWaitValue32_v2)                                                                                          \
    X(cuStreamWaitValue32_v2_ptsz)                                                                                     \
    X(cuStreamWaitValue64)                                                                                             \
    X(cuStreamWaitValue64_ptsz)                                                                                        \
    X(cuStreamWaitValue64_v2)                                                                                          \
    X(cuStreamWaitValue64_v2_ptsz)                                                                                     \
    X(cuLaunchHostFunc)                                                                                                \
    X(cuLaunchHostFunc_ptsz)                                                                                           \
    X(cuStreamAddCallback)                                                                                             \
    X(cuStreamAddCallback_ptsz)                                                                                        \
    X(cuMemsetD8Async)                                                                                                 \
    X(cuMemsetD8Async_ptsz)                                                                                            \
    X(cuMemsetD16Async)                                                                                                \
    X(cuMemsetD16Async_ptsz)                                                                                           \
    X(cuMemsetD32Async)                                                                                                \
    X(cuMemsetD32Async_ptsz)                                                                                           \
    /* copies */                                                                                                       \
    X(cuMemcpy)                                                                                                        \
    X(cuMemcpy_ptds)                                                                                                   \
    X(cuMemcpyAsync)                                                                                                   \
    X(cuMemcpyAsync_ptsz)                                                                                              \
    X(cuMemcpyHtoD_v2)                                                                                                 \
    X(cuMemcpyHtoD_v2_ptds)                                                                                            \
    X(cuMemcpyHtoDAsync_v2)                                                                                            \
    X(cuMemcpyHtoDAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyDtoH_v2)                                                                                                 \
    X(cuMemcpyDtoH_v2_ptds)                                                                                            \
    X(cuMemcpyDtoHAsync_v2)                                                                                            \
    X(cuMemcpyDtoHAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyDtoD_v2)                                                                                                 \
    X(cuMemcpyDtoD_v2_ptds)                                                                                            \
    X(cuMemcpyDtoDAsync_v2)                                                                                            \
    X(cuMemcpyDtoDAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyPeer)                                                                                                    \
    X(cuMemcpyPeer_ptds)                                                                                               \
    X(cuMemcpyPeerAsync)                                                                                               \
    X(cuMemcpyPeerAsync_ptsz)                                                                                          \
    /* memory */                                                                                                       \
    X(cuMemAlloc_v2)                                                                                                   \
    X(cuMemAllocPitch_v2)                                                                                              \
    X(cuMemAllocManaged)                                                                                               \
    X(cuMemFree_v2)                                                                                                    \
    X(cuMemAllocAsync)                                                                                                 \
    X(cuMemAllocAsync_ptsz)                                                                                            \
    X(cuMemAllocFromPoolAsync)                                                                                         \
    X(cuMemAllocFromPoolAsync_ptsz)                                                                                    \
    X(cuMemFreeAsync)                                                                                                  \
    X(cuMemFreeAsync_ptsz)                                                                                             \
    X(cuMemPoolCreate)                                                                                                 \
    X(cuMemPoolDestroy)                                                                                                \
    X(cuMemCreate)                                                                                                     \
    X(cuMemRelease)                                                                                                    \
    X(cuMemRetainAllocationHandle)                                                                                     \
    X(cuMemMap)                                                                                                        \
    X(cuMemUnmap)                                                                                                      \
    X(cuMemGetInfo_v2)                                                                                                 \
    X(cuDeviceTotalMem_v2)                                                                                             \
    /* fills in two dimensions or waiting, and other work of no kernel */                                              \
    X(cuMemsetD2D8Async)                                                                                               \
    X(cuMemsetD2D8Async_ptsz)                                                                                          \
    X(cuMemsetD2D16Async)                                                                                              \
    X(cuMemsetD2D16Async_ptsz)                                                                                         \
    X(cuMemsetD2D32Async)                                                                                              \
    X(cuMemsetD2D32Async_ptsz)                                                                                         \
    X(cuMemsetD8)                                                                                                      \
    X(cuMemsetD8_v2)                                                                                                   \
    X(cuMemsetD8_v2_ptds)                                                                                              \
    X(cuMemsetD16)                                                                                                     \
    X(cuMemsetD16_v2)                                                                                                  \
    X(cuMemsetD16_v2_ptds)                                                                                             \
    X(cuMemsetD32)                                                                                                     \
    X(cuMemsetD32_v2)                                                                                                  \
    X(cuMemsetD32_v2_ptds)                                                                                             \
    X(cuMemsetD2D8)                                                                                                    \
    X(cuMemsetD2D8_v2)                                                                                                 \
    X(cuMemsetD2D8_v2_ptds)                                                                                            \
    X(cuMemsetD2D16)                                                                                                   \
    X(cuMemsetD2D16_v2)                                                                                                \
    X(cuMemsetD2D16_v2_ptds)                                                                                           \
    X(cuMemsetD2D32)                                                                                                   \
    X(cuMemsetD2D32_v2)                                                                                                \
    X(cuMemsetD2D32_v2_ptds)                                                                                           \
    X(cuMemBatchDecompressAsync)                                                                                       \
    X(cuMemBatchDecompressAsync_ptsz)                                                                                  \
    X(cuFabricCpyBatchAsync)                                                                                           \
    X(cuFabricCpyBatchAsync_ptsz)                                                                                      \
    X(cuLaunchHostFunc_v2)                                                                                             \
    X(cuLaunchHostFunc_v2_ptsz)                                                                                        \
    /* copies of other shapes */                                                                                       \
    X(cuMemcpyHtoD)                                                                                                    \
    X(cuMemcpyHtoDAsync)                                                                                               \
    X(cuMemcpyDtoH)                                                                                                    \
    X(cuMemcpyDtoHAsync)                                                                                               \
    X(cuMemcpyDtoD)                                                                                                    \
    X(cuMemcpyDtoDAsync)                                                                                               \
    X(cuMemcpyWithAttributesAsync)                                                                                     \
    X(cuMemcpyWithAttributesAsync_ptsz)                                                                                \
    X(cuMemcpyDtoA)                                                                                                    \
    X(cuMemcpyDtoA_v2)                                                                                                 \
    X(cuMemcpyDtoA_v2_ptds)                                                                                            \
    X(cuMemcpyAtoD)                                                                                                    \
    X(cuMemcpyAtoD_v2)                                                                                                 \
    X(cuMemcpyAtoD_v2_ptds)                                                                                            \
    X(cuMemcpyHtoA)                                                                                                    \
    X(cuMemcpyHtoA_v2)                                                                                                 \
    X(cuMemcpyHtoA_v2_ptds)                                                                                            \
    X(cuMemcpyAtoH)                                                                                                    \
    X(cuMemcpyAtoH_v2)                                                                                                 \
    X(cuMemcpyAtoH_v2_ptds)                                                                                            \
    X(cuMemcpyAtoA)                                                                                                    \
    X(cuMemcpyAtoA_v2)                                                                                                 \
    X(cuMemcpyAtoA_v2_ptds)                                                                                            \
    X(cuMemcpyHtoAAsync)                                                                                               \
    X(cuMemcpyHtoAAsync_v2)                                                                                            \
    X(cuMemcpyHtoAAsync_v2_ptsz)                                                                                       \
    X(cuMemcpyAtoHAsync)                                                                                               \
    X(cuMemcpyAtoHAsync_v2)                                                                                            \
    X(cuMemcpyAtoHAsync_v2_ptsz)                                                                                       \
    X(cuMemcpy2D)                                                                                                      \
    X(cuMemcpy2D_v2)                                                                                                   \
    X(cuMemcpy2D_v2_ptds)                                                                                              \
    X(cuMemcpy2DUnaligned)                                                                                             \
    X(cuMemcpy2DUnaligned_v2)                                                                                          \
    X(cuMemcpy2DUnaligned_v2_ptds)                                                                                     \
    X(cuMemcpy3D)                                                                                                      \
    X(cuMemcpy3D_v2)                                                                                                   \
    X(cuMemcpy3D_v2_ptds)                                                                                              \
    X(cuMemcpy2DAsync)                                                                                                 \
    X(cuMemcpy2DAsync_v2)                                                                                              \
    X(cuMemcpy2DAsync_v2_ptsz)                                                                                         \
    X(cuMemcpy3DAsync)                                                                                                 \
    X(cuMemcpy3DAsync_v2)                                                                                              \
    X(cuMemcpy3DAsync_v2_ptsz)                                                                                         \
    X(cuMemcpy3DPeer)                                                                                                  \
    X(cuMemcpy3DPeer_ptds)                                                                                             \
    X(cuMemcpy3DPeerAsync)                                                                                             \
    X(cuMemcpy3DPeerAsync_ptsz)                                                                                        \
    X(cuMemcpyBatchAsync)                                                                                              \
    X(cuMemcpyBatchAsync_ptsz)                                                                                         \
    X(cuMemcpyBatchAsync_v2)                                                                                           \
    X(cuMemcpyBatchAsync_v2_ptsz)                                                                                      \
    X(cuMemcpy3DBatchAsync)                                                                                            \
    X(cuMemcpy3DBatchAsync_ptsz)                                                                                       \
    X(cuMemcpy3DBatchAsync_v2)                                                                                         \
    X(cuMemcpy3DBatchAsync_v2_ptsz)                                                                                    \
    X(cuMemcpy3DWithAttributesAsync)                                                                                   \
    X(cuMemcpy3DWithAttributesAsync_ptsz)                                                                              \
    /* captures that are newer */                                                                                      \
    X(cuStreamBeginRecaptureToGraph)                                                                                   \
    X(cuStreamBeginRecaptureToGraph_ptsz)                                                                              \
    X(cuStreamBeginCaptureToCig)                                                                                       \
    X(cuStreamBeginCaptureToCig_ptsz)                                                                                  \
    X(cuStreamEndCaptureToCig)                                                                                         \
    X(cuStreamEndCaptureToCig_ptsz)                                                                                    \
    /* graphs and their memory */                                                                                      \
    X(cuGraphAddMemAllocNode)                                                                                          \
    X(cuGraphAddNode)                                                                                                  \
    X(cuGraphAddNode_v2)                                                                                               \
    X(cuGraphAddNode_v3)                                                                                               \
    X(cuGraphInstantiate)                                                                                              \
    X(cuGraphInstantiate_v2)                                                                                           \
    X(cuGraphInstantiateWithFlags)                                                                                     \
    X(cuGraphInstantiateWithParams)                                                                                    \
    X(cuGraphInstantiateWithParams_ptsz)                                                                               \
    X(cuGraphUpload)                                                                                                   \
    X(cuGraphUpload_ptsz)                                                                                              \
    X(cuDeviceGraphMemTrim)                                                                                            \
    /* arrays */                                                                                                       \
    X(cuArrayCreate)                                                                                                   \
    X(cuArrayCreate_v2)                                                                                                \
    X(cuArray3DCreate)                                                                                                 \
    X(cuArray3DCreate_v2)                                                                                              \
    X(cuArrayDestroy)                                                                                                  \
    X(cuMipmappedArrayCreate)                                                                                          \
    X(cuMipmappedArrayDestroy)                                                                                         \
    X(cuMemMapArrayAsync)                                                                                              \
    X(cuMemMapArrayAsync_ptsz)                                                                                         \
    /* modules and libraries */                                                                                        \
    X(cuModuleLoad)                                                                                                    \
    X(cuModuleLoadData)                                                                                                \
    X(cuModuleLoadDataEx)                                                                                              \
    X(cuModuleLoadFatBinary)                                                                                           \
    X(cuModuleUnload)                                                                                                  \
    X(cuModuleGetGlobal)                                                                                               \
    X(cuModuleGetGlobal_v2)                                                                                            \
    X(cuLibraryLoadData)                                                                                               \
    X(cuLibraryLoadFromFile)                                                                                           \
    X(cuLibraryUnload)                                                                                                 \
    X(cuLibraryGetGlobal)                                                                                              \
    X(cuLibraryGetManaged)                                                                                             \
    /* other processes' memory */                                                                                      \
    X(cuMemImportFromShareableHandle)                                                                                  \
    X(cuMemPoolImportFromShareableHandle)                                                                              \
    /* contexts of other kinds and sizes */                                                                            \
    X(cuGreenCtxCreate)                                                                                                \
    X(cuGreenCtxDestroy)                                                                                               \
    X(cuCtxSetLimit)                                                                                                   \
    /* memory as CUDA 2 had it */                                                                                      \
    X(cuMemAlloc)                                                                                                      \
    X(cuMemAllocPitch)                                                                                                 \
    X(cuMemFree)                                                                                                       \
    X(cuMemGetInfo)                                                                                                    \
    X(cuDeviceTotalMem)

/* Driver functions that the hook itself calls. */
#define PM_NEEDS(X)                                                                                                    \
    X(cuCtxGetCurrent)                                                                                                 \
    X(cuCtxGetDevice)                                                                                                  \
    X(cuCtxPushCurrent_v2)                                                                                             \
    X(cuCtxPopCurrent_v2)                                                                                              \
    X(cuDeviceGetUuid)                                                                                                 \
    X(cuDeviceGetUuid_v2)                                                                                              \
    X(cuDevicePrimaryCtxGetState)                                                                                      \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuStreamGetCtx)                                                                                                  \
    X(cuEventCreate)                                                                                                   \
    X(cuEventDestroy_v2)                                                                                               \
    X(cuEventRecord)                                                                                                   \
    X(cuEventQuery)                                                                                                    \
    X(cuEventElapsedTime)                                                                                              \
    X(cuFuncGetName)                                                                                                   \
    X(cuPointerGetAttribute)                                                                                           \
    X(cuArray3DGetDescriptor_v2)                                                                                       \
    X(cuArrayGetMemoryRequirements)                                                                                    \
    X(cuMipmappedArrayGetMemoryRequirements)                                                                           \
    X(cuGraphGetNodes)                                                                                                 \
    X(cuGraphNodeGetType)                                                                                              \
    X(cuGraphMemAllocNodeGetParams)                                                                                    \
    X(cuGraphMemFreeNodeGetParams)                                                                                     \
    X(cuGraphChildGraphNodeGetGraph)                                                                                   \
    X(cuDeviceGetGraphMemAttribute)                                                                                    \
    X(cuDeviceGetAttribute)                                                                                            \
    X(cuCtxGetLimit)                                                                                                   \
    X(cuCtxFromGreenCtx)                                                                                               \
    X(cuKernelGetName)

#define PM_ENUM_HOOK(name) PM_HOOK_##name,
#define PM_ENUM_NEED(name) PM_NEED_##name,
enum pm_hook { PM_HOOKS(PM_ENUM_HOOK) PM_HOOK_COUNT };
enum pm_need { PM_NEEDS(PM_ENUM_NEED) PM_NEED_COUNT };

extern void *pm_real[PM_HOOK_COUNT];
extern void *pm_need[PM_NEED_COUNT];
extern int pm_resolved;

/* Finds the driver and its functions, loading it when nobody did; false: there is none. */
int pm_resolve(void);

static inline int pm_ready(void) {
    return __atomic_load_n(&pm_resolved, __ATOMIC_ACQUIRE) || pm_resolve();
}

/* The shim for a driver function, by its real address; the address itself when it is not interposed. */
void *pm_shim_of(void *real);

#define PM_REAL(name) ((__typeof__(&name))pm_real[PM_HOOK_##name])
#define PM_NEED(name) ((__typeof__(&name))pm_need[PM_NEED_##name])
#define PM_EXPORT __attribute__((visibility("default")))

#endif
