// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

// Package cluster runs fairlead's DaemonSet, from the release's image and the manifests in
// deploy, in a real cluster of one node: kube-apiserver, etcd, the scheduler, controllers,
// a kubelet and containerd, as hack/provision-engines.sh provides them.
//
// The tests run in an enclave, on one cluster. They need root.
package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// Tags of the release's image: two versions, as an upgrade needs.
const (
	version    = "v0.0.1-test"
	newVersion = "v0.0.2-test"
)

// imageVariable names a directory with the archives of the images, one in a directory of
// each version; they are built if it is not set.
const imageVariable = "FAIRLEAD_CLUSTER_IMAGES"

// node is the cluster of all tests.
var node *cluster.Node

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.list").Value.String() != "" {
		os.Exit(m.Run())
	}
	run := runInside
	if enclave.Dir() != "" {
		run = func() (int, error) { return runTests(m) }
	}
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// runInside runs this binary again in an enclave, with what only can be built outside.
func runInside() (int, error) {
	dir, err := os.MkdirTemp("", "fl-cluster-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary, err := program.Path(dir)
	if err != nil {
		return 0, err
	}
	images := os.Getenv(imageVariable)
	if images == "" {
		images = dir
		for _, v := range []string{version, newVersion} {
			if err := release(v, filepath.Join(dir, v)); err != nil {
				return 0, err
			}
		}
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), program.Variable+"="+binary, imageVariable+"="+images)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = enclave.Run(cmd)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil
	}
	return 0, err
}

// release builds the image as `make release` does.
func release(version, out string) error {
	cmd := exec.Command("go", "-C", "../../hack/release", "run", ".",
		"-version", version, "-systems", "linux/"+runtime.GOARCH, "-kinds", "image", "-out", out)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the image: %w: %s", err, out)
	}
	return nil
}

// runTests starts the cluster and runs the tests.
func runTests(m *testing.M) (int, error) {
	if err := enclave.SetUp(); err != nil {
		return 0, fmt.Errorf("set up the namespaces: %w", err)
	}
	dir, err := os.MkdirTemp(enclave.Dir(), "cluster-")
	if err != nil {
		return 0, err
	}
	images, err := filepath.Glob(filepath.Join(os.Getenv(imageVariable), "*", "*_image.tar"))
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute) // a busy machine is ten times slower
	defer cancel()
	if node, err = cluster.StartNode(ctx, dir, images...); err != nil {
		return 0, fmt.Errorf("start the cluster: %w", err)
	}
	return m.Run(), nil
}
