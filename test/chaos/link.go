// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// proxy joins host and agent, and breaks what goes through it.
type proxy struct {
	path, to string
	listener net.Listener
	delay    atomic.Int64 // of each piece, in nanoseconds
	truncate atomic.Bool  // end connections in the middle of a piece

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func newProxy(dir, to string) (*proxy, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	p := &proxy{path: filepath.Join(dir, "s"), to: to, conns: map[net.Conn]struct{}{}}
	var err error
	if p.listener, err = net.Listen("unix", p.path); err != nil {
		return nil, err
	}
	if err := os.Chmod(p.path, 0o600); err != nil {
		return nil, err
	}
	go p.accept()
	return p, nil
}

func (p *proxy) accept() {
	for {
		near, err := p.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("unix", p.to)
		if err != nil {
			_ = near.Close()
			continue
		}
		p.mu.Lock()
		p.conns[near], p.conns[far] = struct{}{}, struct{}{}
		p.mu.Unlock()
		go p.copy(near, far)
		go p.copy(far, near)
	}
}

// copy moves bytes one way until one side ends.
func (p *proxy) copy(to, from net.Conn) {
	defer func() {
		_, _ = to.Close(), from.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.conns, to)
		delete(p.conns, from)
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		time.Sleep(time.Duration(p.delay.Load()))
		if p.truncate.Load() && n > 1 {
			_, _ = to.Write(b[:n/2])
			return
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) close() {
	_ = p.listener.Close()
	p.cut()
}
