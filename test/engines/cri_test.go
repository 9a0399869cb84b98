// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// cniConfig is a network with portmap, as a cluster on one node has it.
const cniConfig = `{"cniVersion":"0.4.0","name":"pods","plugins":[
{"type":"bridge","bridge":"pods0","isGateway":true,"ipMasq":true,
 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.245.0.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}`

const criImage = "docker.io/library/" + enclave.Image + ":latest"

// A pod with hostPorts, made through the CRI as a kubelet does.
func TestReachCRIHostPorts(t *testing.T) {
	if err := os.MkdirAll("/etc/cni/net.d", 0o755); err != nil {
		t.Fatal(err)
	}
	const conf = "/etc/cni/net.d/10-pods.conflist"
	if err := os.WriteFile(conf, []byte(cniConfig), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(conf) })
	startContainerd(t)
	if _, err := nerdctl("k8s.io", "load", "-i", imageArchive(t)); err != nil {
		t.Fatal(err)
	}
	src := containerdSource(t, time.Hour)
	r, _ := follow(t, src)
	want(t, r)

	cc, err := grpc.NewClient("unix://"+containerdSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cc.Close() }()
	cri, images := runtimeapi.NewRuntimeServiceClient(cc), runtimeapi.NewImageServiceClient(cc)
	ctx, cancel := context.WithTimeout(context.Background(), 3*limit())
	defer cancel()
	// The CRI starts after containerd answers and learns of the image later. It would
	// look up an unknown image in a registry.
	eventually(t, func() error {
		status, err := cri.Status(ctx, &runtimeapi.StatusRequest{})
		if err != nil {
			return err
		}
		for _, c := range status.GetStatus().GetConditions() {
			if !c.GetStatus() {
				return fmt.Errorf("%s: %s", c.GetType(), c.GetMessage())
			}
		}
		image, err := images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: criImage}})
		if err == nil && image.GetImage() == nil {
			err = fmt.Errorf("%s is not known", criImage)
		}
		return err
	})
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-1", Namespace: "shop", Uid: "u1"},
		Labels: map[string]string{
			"io.kubernetes.pod.name": "web-1", "io.kubernetes.pod.namespace": "shop", "io.kubernetes.pod.uid": "u1", "app": "web",
		},
		LogDirectory: t.TempDir(),
		PortMappings: []*runtimeapi.PortMapping{
			{ContainerPort: 80, HostPort: 8080},
			{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 5353, HostIp: "127.0.0.1"},
			{ContainerPort: 9},
		},
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/" + cgroupParent()},
	}
	pod, err := cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	remove := func() error {
		_, err := cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
		if err == nil {
			_, err = cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
		}
		return err
	}
	t.Cleanup(func() { _ = remove() })
	web := []string{"tcp 0.0.0.0:8080 web-1", "udp 127.0.0.1:5353 web-1"}
	want(t, r, web...)
	var b port.Binding
	eventually(t, func() error {
		b = find(r, "tcp 0.0.0.0:8080")
		if b.Owner.Namespace != "shop" || b.Owner.Labels["app"] != "web" || len(b.Dial) != 2 {
			return fmt.Errorf("owner %+v, dialled at %v", b.Owner, b.Dial)
		}
		return nil
	})
	addressOf(t, src.Facts(), b.Dial[1].Addr(), "web-1")

	// A container of the pod, which adds no port and has a cgroup of its own.
	c, err := cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.GetPodSandboxId(), SandboxConfig: config,
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "app"},
			Image:    &runtimeapi.ImageSpec{Image: criImage},
			Labels: map[string]string{
				"io.kubernetes.pod.name": "web-1", "io.kubernetes.pod.namespace": "shop", "io.kubernetes.container.name": "app",
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.GetContainerId()}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		out, err := try("sh", "-c", "ctr -a "+containerdSocket+" -n k8s.io tasks ls | awk '$1==\""+c.GetContainerId()+"\" {print $2}'")
		if err != nil {
			return err
		}
		pid, err := strconv.Atoi(out)
		if err != nil {
			return err
		}
		return attributed(src.Facts(), pid, "web-1/app")
	})
	if got := r.keys(); !slices.Equal(got, web) {
		t.Errorf("a container of the pod moved the set to %q", got)
	}

	if err := remove(); err != nil {
		t.Fatal(err)
	}
	want(t, r)
	r.warned(t, "")
}
