// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/test/kit/cluster"
	"github.com/fairlead/fairlead/test/kit/program"
	"github.com/fairlead/fairlead/test/kit/usage"
)

// server is an API server with its etcd, in a network namespace of its own.
type server struct {
	*cluster.Cluster
	space     *netns.Space
	http      *http.Client // to etcd
	dir       string
	apiserver string // the program
	etcd, api *program.Process
}

// nodeAddr is what the API server advertises; nobody connects there.
const nodeAddr = "192.168.77.1"

func startServer(ctx context.Context, dir, apiserver string) (*server, error) {
	space, err := netns.New()
	if err != nil {
		return nil, err
	}
	c, err := cluster.New(dir, space.Dial)
	if err != nil {
		return nil, err
	}
	s := &server{Cluster: c, space: space, dir: dir, apiserver: apiserver}
	s.http = &http.Client{Transport: &http.Transport{Dial: space.Dial}} //nolint:staticcheck // the namespace has no other
	if s.etcd, err = s.start("etcd", c.Etcd()); err != nil {
		return nil, err
	}
	if err := until(ctx, 200*time.Millisecond, func() error { _, err := s.metrics(); return err }); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return s, s.startAPI(ctx)
}

func (s *server) startAPI(ctx context.Context) error {
	args := s.APIServer(nodeAddr)
	args[0] = s.apiserver
	var err error
	if s.api, err = s.start("api", args); err != nil {
		return err
	}
	return until(ctx, 200*time.Millisecond, func() error { return s.Answers(ctx) })
}

func (s *server) start(name string, args []string) (*program.Process, error) {
	return program.Launch(program.Command{Cmd: exec.Command(args[0], args[1:]...), In: s.space, Log: filepath.Join(s.dir, name+".log")})
}

func end(p *program.Process) {
	if p != nil {
		p.Kill()
	}
}

func (s *server) close() {
	end(s.api)
	end(s.etcd)
	_ = s.space.Close()
}

// until tries f until it succeeds, for at most three minutes.
func until(ctx context.Context, pause time.Duration, f func() error) error {
	deadline := time.Now().Add(3 * time.Minute)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		if err := schedule.Sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// load is what server and etcd have used so far.
type load struct {
	api, etcd usage.Usage
	written   float64 // bytes, in use in etcd's database and not compacted
}

var inUse = regexp.MustCompile(`(?m)^etcd_mvcc_db_total_size_in_use_in_bytes (\S+)`)

// metrics returns the size of etcd's database.
func (s *server) metrics() (float64, error) {
	resp, err := s.http.Get("http://127.0.0.1:2379/metrics")
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	m := inUse.FindSubmatch(b)
	if m == nil {
		return 0, fmt.Errorf("etcd has no metric of its size")
	}
	return strconv.ParseFloat(string(m[1]), 64)
}

func (s *server) load() (load, error) {
	var l load
	var err error
	if l.api, err = usage.Of(s.api.PID()); err != nil {
		return l, err
	}
	if l.etcd, err = usage.Of(s.etcd.PID()); err != nil {
		return l, err
	}
	l.written, err = s.metrics()
	return l, err
}
